"""What vLLM does around the halves of the connector, small enough to be read, and less forgiving.

A scheduler with chunked prefill, preemption, asynchronous loads and delayed frees, and workers
whose tensors are plain memory. Every block has the bytes that its hash, rank, group and layer say,
and they are looked at before each use. A block that is free is written over in the next step. What
vLLM asserts of a connector is asserted here.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvstrata.engines import Counters, Identity, Link, Settings
from kvstrata.vllm.connector.plan import NULL_BLOCK, Plan, Progress, Step
from kvstrata.vllm.connector.scheduler import SchedulerHalf
from kvstrata.vllm.connector.worker import WorkerHalf

BLOCK_TOKENS = 4
HEADS, WIDTH = 2, 16
"""Of a layer: heads, and bytes of a token in one of them."""
PAGE = HEADS * BLOCK_TOKENS * WIDTH
LAYERS = 3


class Tensor:
    """Memory with a shape and strides, as a tensor of torch has them. `order` is that of memory."""

    dtype = "torch.uint8"
    device = SimpleNamespace(type="cpu")

    def __init__(self, blocks: int, order: str = "BHNC") -> None:
        sizes = {"B": blocks, "H": HEADS, "N": BLOCK_TOKENS, "C": WIDTH}
        strides, step = {}, 1
        for name in reversed(order):
            strides[name], step = step, step * sizes[name]
        self.shape = tuple(sizes[name] for name in "BHNC")
        self._strides = tuple(strides[name] for name in "BHNC")
        self._places = [
            head * strides["H"] + token * strides["N"] + at * strides["C"]
            for head in range(HEADS)
            for token in range(BLOCK_TOKENS)
            for at in range(WIDTH)
        ]
        self.is_plain = self._places == list(range(PAGE))
        self._memory = (ctypes.c_ubyte * step)()
        self.bytes = memoryview(self._memory).cast("B")

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self._strides

    def element_size(self) -> int:
        """Bytes of an element."""
        return 1

    def data_ptr(self) -> int:
        """The address of the first element."""
        return ctypes.addressof(self._memory)

    def places(self, block: int) -> list[int]:
        """Where the bytes of a block lie, in logical order."""
        first = block * self._strides[0]
        return [first + place for place in self._places]

    def get(self, block: int) -> bytes:
        """The bytes of a block, in logical order."""
        if self.is_plain:
            return bytes(self.bytes[block * PAGE : (block + 1) * PAGE])
        return bytes(self.bytes[place] for place in self.places(block))

    def set(self, block: int, content: bytes) -> None:
        """Writes the bytes of a block."""
        if self.is_plain:
            self.bytes[block * PAGE : (block + 1) * PAGE] = content
            return
        for place, byte in zip(self.places(block), content, strict=True):
            self.bytes[place] = byte


@dataclass(eq=False)
class Request:
    """What the connector sees of a request, and what the scheduler knows of it."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    state: str = "waiting"
    left: int = 1
    external: int = 0

    def __post_init__(self) -> None:
        """Hashes the prompt."""
        self.hash()

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens)

    def hash(self) -> None:
        """Hashes the blocks that have become full."""
        while (len(self.block_hashes) + 1) * BLOCK_TOKENS <= len(self.tokens):
            at = len(self.block_hashes) * BLOCK_TOKENS
            parent = self.block_hashes[-1] if self.block_hashes else b"root"
            part = repr(self.tokens[at : at + BLOCK_TOKENS]).encode()
            self.block_hashes.append(hashlib.sha256(parent + part).digest())


def expected(hash_: bytes, rank: int, group: int, layer: int) -> bytes:
    """The bytes of a block in one layer."""
    name = hash_ + bytes([rank, group, layer])
    return hashlib.shake_128(name).digest(PAGE)


class FakeEngine:
    """See the module. Ranks that are `copies` of each other hold the same bytes."""

    def __init__(
        self,
        endpoint: str,
        *,
        model: str = "fake",
        ranks: int = 1,
        copies: int = 1,
        windows: Sequence[int | None] = (None,),
        blocks: int = 64,
        budget: int = 64,
        staging_blocks: int = 32,
        order: str = "BHNC",
        loads: bool = True,
        saves: bool = True,
        **settings: Any,
    ) -> None:
        parsed, _ = Settings.parse({"endpoint": endpoint, "timeout": 3.0, **settings})
        self.windows, self.budget, self.copies = windows, budget, copies
        self.ranks = ranks
        self.counters = Counters()
        self.worker_counters = Counters()
        self.tensors = [
            {
                f"{group}.{layer}": Tensor(blocks, order)
                for group in range(len(windows))
                for layer in range(LAYERS)
            }
            for _ in range(ranks)
        ]
        names = [[f"{group}.{layer}" for layer in range(LAYERS)] for group in range(len(windows))]
        staging = staging_blocks * PAGE * LAYERS * len(windows)
        self.workers = []
        for rank in range(ranks):
            link = Link(parsed, self.worker_counters)
            worker = WorkerHalf(link, self.worker_counters, rank, staging, windows=len(windows) > 1)
            worker.register(dict(self.tensors[rank]), names, blocks)
            self.workers.append(worker)

        def identify(plan: Plan) -> Identity:
            return Identity(
                model=model,
                engine="vllm",
                dtype="uint8",
                block_tokens=BLOCK_TOKENS,
                parts=plan.parts,
                hash_algorithm="sha256",
                layout=plan.layout,
            )

        self.link = Link(parsed, self.counters)
        self.scheduler = SchedulerHalf(
            self.link,
            self.counters,
            identify,
            block_tokens=BLOCK_TOKENS,
            copies=copies,
            loads=loads,
            saves=saves,
        )
        shapes = {rank: worker.shape() for rank, worker in enumerate(self.workers)}
        self.scheduler.shapes({rank: shape for rank, shape in shapes.items() if shape})
        self.free = deque(range(1, blocks))
        self.blocks = len(self.free)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: set[str] = set()
        self.preempted: set[str] = set()
        self.receiving: dict[str, int] = {}
        self.sending: dict[str, int] = {}
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.asked: dict[str, int] = {}

    def add(self, name: str, tokens: Sequence[int], outputs: int = 1) -> Request:
        """A new request that wants so many tokens."""
        request = Request(name, list(tokens), len(tokens), left=outputs)
        self.requests[name] = request
        self.waiting.append(request)
        return request

    def run(self, *names: str, seconds: float = 20.0) -> None:
        """Steps until these requests have ended, or all, and nothing holds blocks any more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if set(names or self.requests) <= self.ended and not self.requests.keys() - self.ended:
                return
            self.step()
        raise AssertionError(f"they do not end: {self.requests.keys()}")

    def generate(self, name: str, tokens: Sequence[int], outputs: int = 1) -> int:
        """Runs one request; returns how many of its tokens came from outside."""
        request = self.add(name, tokens, outputs)
        self.run(name)
        return request.external

    def settle(self) -> None:
        """Steps until nothing is read from the engine's blocks, and all stores have ended."""
        while self.scheduler.is_saving() or any(worker.is_busy for worker in self.workers):
            self.step()

    def step(self) -> None:
        """One step of the scheduler and of all workers."""
        tokens = self._schedule()
        output = SimpleNamespace(
            preempted_req_ids=self.preempted,
            num_scheduled_tokens=tokens,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: tuple(self.requests[name].blocks)
            ),
        )
        self.preempted = set()
        sent: Step = self.scheduler.build(output)
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        progress: Progress | None = None
        received: set[str] = set()
        finished: set[str] = set()
        invalid: set[int] = set()
        failed: set[str] = set()
        for rank, worker in enumerate(self.workers):
            step: Step = pickle.loads(pickle.dumps(sent))
            worker.preempt(step)
            self._forward(rank, tokens)
            worker.load(step)
            worker.save(step)
            done, got, short = worker.results(step)
            failed |= short
            invalid |= worker.errors()
            told = worker.progress()
            progress = told if progress is None else progress.merge(told)
            finished |= self._count(self.sending, done)
            received |= self._count(self.receiving, got)
        self._after(tokens, invalid, failed & received)
        self.scheduler.update(received, progress)
        self._transferred(received, finished)

    def abort(self, name: str) -> None:
        """Ends a request wherever it is."""
        request = self.requests[name]
        is_loading = request.state == "loading" and name not in self.received
        self.received.discard(name)
        self.failed.discard(name)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._finish(request, is_loading)

    def preempt(self, name: str) -> None:
        """Takes a running request's blocks away."""
        request = self.requests[name]
        assert request.state == "running"
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens = 0
        request.state = "waiting"
        self.waiting.insert(0, request)
        self.preempted.add(name)

    def close(self) -> None:
        """Ends both halves."""
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def _schedule(self) -> dict[str, int]:
        tokens: dict[str, int] = {}
        budget = self.budget
        for request in self.running:
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            behind = request.num_computed_tokens
            if count and self._grow(request, behind + count, behind):
                tokens[request.request_id] = count
                budget -= count
        for request in list(self.waiting):
            name = request.request_id
            if request.state == "loading":
                if name not in self.received:
                    continue
                self.received.discard(name)
                request.state = "waiting"
                if name in self.failed:
                    self.failed.discard(name)
                    if not request.num_computed_tokens:
                        self._free(request)
            external = 0
            if not request.num_computed_tokens:
                self.asked[name] = self.asked.get(name, 0) + 1
                found, is_async = self.scheduler.matched(request, 0)
                if found is None:
                    continue
                assert is_async == bool(found)
                assert found % BLOCK_TOKENS == 0
                assert found < request.num_tokens
                external = found
            count = 0 if external else min(budget, request.num_tokens - request.num_computed_tokens)
            if not external and not count:
                continue
            if not request.blocks and not self._has_room(request):
                continue
            behind = request.num_computed_tokens + external
            if not self._grow(request, behind + count, behind):
                continue
            self.scheduler.allocated(request, partial(list, request.blocks), external)
            if external:
                request.state, request.num_computed_tokens = "loading", external
                request.external += external
                self.receiving[name] = self.ranks
                continue
            request.state = "running"
            self.waiting.remove(request)
            self.running.append(request)
            tokens[name] = count
            budget -= count
        return tokens

    def _has_room(self, request: Request) -> bool:
        """Whether it fits beside all that hold blocks, however long those become."""
        holding = [each for each in self.requests.values() if each.blocks]
        lengths = [each.num_tokens + each.left for each in (*holding, request)]
        wanted = sum(-(-length // BLOCK_TOKENS) for length in lengths)
        return wanted * len(self.windows) <= self.blocks

    def _grow(self, request: Request, tokens: int, behind: int) -> bool:
        """Blocks for so many tokens; a window lets go of what is too far behind so many."""
        request.blocks = request.blocks or [[] for _ in self.windows]
        wanted = -(-tokens // BLOCK_TOKENS)
        if sum(wanted - len(held) for held in request.blocks) > len(self.free):
            return False
        for held, window in zip(request.blocks, self.windows, strict=True):
            gone = 0 if window is None else max(0, behind - window) // BLOCK_TOKENS
            for at in range(min(gone, len(held))):
                if held[at] != NULL_BLOCK:
                    self.free.append(held[at])
                    held[at] = NULL_BLOCK
            while len(held) < wanted:
                held.append(NULL_BLOCK if len(held) < gone else self.free.popleft())
        return True

    def _forward(self, rank: int, tokens: dict[str, int]) -> None:
        layers = self.tensors[rank]
        shard = rank // self.copies
        for block in self.free:
            for tensor in layers.values():
                tensor.set(block, b"\xee" * PAGE)
        for name, count in tokens.items():
            request = self.requests[name]
            before = request.num_computed_tokens - count
            for at, hash_ in enumerate(request.block_hashes):
                if at * BLOCK_TOKENS >= request.num_computed_tokens:
                    break
                for group, held in enumerate(request.blocks):
                    for layer in range(LAYERS):
                        tensor = layers[f"{group}.{layer}"]
                        content = expected(hash_, shard, group, layer)
                        if (at + 1) * BLOCK_TOKENS <= before:
                            if held[at] != NULL_BLOCK:
                                assert tensor.get(held[at]) == content, (
                                    f"{name}: block {at} of {group}"
                                )
                        elif (at + 1) * BLOCK_TOKENS <= request.num_computed_tokens:
                            tensor.set(held[at], content)

    def _count(self, left: dict[str, int], told: set[str]) -> set[str]:
        """Those that now all workers have told of; each tells once."""
        complete = set()
        for name in told:
            assert left.get(name, 0) > 0, f"{name} was told of though nobody waits for it"
            left[name] -= 1
            if not left[name]:
                del left[name]
                complete.add(name)
        return complete

    def _after(self, tokens: dict[str, int], invalid: set[int], failed: set[str]) -> None:
        if invalid:
            assert len(self.windows) == 1
            for request in self.waiting:
                if request.state == "loading":
                    bad = [at for at, block in enumerate(request.blocks[0]) if block in invalid]
                    if bad:
                        good = min(bad[0] * BLOCK_TOKENS, request.num_computed_tokens)
                        request.num_computed_tokens = good
                        self.failed.add(request.request_id)
        for name in failed:
            request = self.requests[name]
            if request.state == "loading":
                request.num_computed_tokens = 0
                self.failed.add(name)
        for name in tokens:
            request = self.requests[name]
            if request in self.running and request.num_computed_tokens == request.num_tokens:
                request.tokens.append(len(request.tokens))
                request.hash()
                request.left -= 1
                if not request.left:
                    self.running.remove(request)
                    self._finish(request, False)

    def _finish(self, request: Request, is_loading: bool) -> None:
        request.state = "ended"
        self.ended.add(request.request_id)
        is_kept = self.scheduler.finished(request)
        assert not (is_kept and is_loading)
        if is_kept:
            self.sending[request.request_id] = self.ranks
        elif not is_loading:
            self._free(request)
            del self.requests[request.request_id]

    def _transferred(self, received: set[str], finished: set[str]) -> None:
        for name in received:
            request = self.requests[name]
            if request.state == "loading":
                self.received.add(name)
                continue
            assert request.state == "ended"
            self._free(request)
            del self.requests[name]
        for name in finished:
            assert self.requests[name].state == "ended"
            self._free(self.requests[name])
            del self.requests[name]

    def _free(self, request: Request) -> None:
        self.free.extend(block for held in request.blocks for block in held if block != NULL_BLOCK)
        request.blocks = []
