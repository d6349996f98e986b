"""The half of the connector in the engine's scheduler: it asks, plans and keeps leases.

It moves no bytes and never waits. For each request:

```text
matched     asks kvstrata once for the whole chain; None until that is answered
allocated   what is to be loaded, and into which blocks
build       the orders of a step: these loads, and saves of all blocks that it completes
update      what has been loaded, or has not
finished    frees leases; says whether the blocks are still being read
```

What kvstrata has of the front of a chain is not saved again. What it has not is, also if another
request computed it: so a server that was emptied fills again with what is in use.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ... import Lease, Lookup, Run
from ...engines import Counters, Done, Identity, Link, Space
from ...engines.promises import is_near
from .plan import NULL_BLOCK, Load, Plan, Progress, Save, Shape, Step

__all__ = ["SchedulerHalf"]

log = logging.getLogger("kvstrata")

LEASE_SECONDS = 30.0
"""How long what was found is kept for a request that may have to queue."""
AGAIN_SECONDS = 0.02
"""Between two lookups while blocks are on their way to where they can be loaded from."""


@dataclass(eq=False, slots=True)
class _Request:
    request: Any
    turn: int = 0
    """Counts lookups; an answer to an older one is of no use."""
    asked_at: float | None = None
    known: bool = False
    found: int = 0
    """Blocks at the front of the chain that kvstrata can deliver."""
    runs: list[Run] = field(default_factory=list)
    lease: Lease | None = None
    again_at: float | None = None
    fetched: int | None = None
    """The first block that was fetched from object."""
    computed: int = 0
    """Tokens that the engine had by itself when it was told of more."""
    loading: bool = False
    barred: bool = False
    """A load has failed: the engine computes, and does not ask again."""
    saved: int | None = None
    """Blocks of the chain that need no saving any more."""
    last_save: int = 0


class SchedulerHalf:
    """See the module. `identify` names what may be shared, given the parts of a block."""

    def __init__(
        self,
        link: Link,
        counters: Counters,
        identify: Callable[[Plan], Identity],
        *,
        block_tokens: int,
        copies: int = 1,
        loads: bool = True,
        saves: bool = True,
        prompt_only: bool = False,
    ) -> None:
        self._link, self._counters, self._identify = link, counters, identify
        self._block_tokens, self._copies = block_tokens, copies
        self._may_load, self._may_save, self._prompt_only = loads, saves, prompt_only
        self._plan: Plan | None = None
        self._identity: Identity | None = None
        self._space: Space | None = None
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, Load] = {}
        self._owed: set[str] = set()
        self._number = self._last_save = self._read_through = 0
        self._workers_busy = False

    def shapes(self, shapes: Mapping[int, Shape]) -> None:
        """The shapes of all workers by rank, from which follow the parts of a block."""
        self._plan = Plan.of(shapes, self._copies)
        self._open(self._identify(self._plan))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens behind `computed` that can be loaded; None: ask again. Asks kvstrata once."""
        with self._counters.call():
            self._drain()
            state = self._state(request)
            if state.barred or request.skip_reading_prefix_cache or not self._asked(state):
                return 0, False
            if not self._may_load:
                return 0, False
            if not state.known:
                return None, False
            # One token is left to compute: what comes next is made from it.
            blocks = min(state.found, (request.num_tokens - 1) // self._block_tokens)
            tokens = blocks * self._block_tokens - computed
            state.computed = computed
            return (tokens, True) if tokens > 0 else (0, False)

    def allocated(
        self, request: Any, blocks: Callable[[], Sequence[Sequence[int]]], tokens: int
    ) -> None:
        """So many tokens are to be loaded into these blocks of each cache group."""
        with self._counters.call():
            state = self._state(request)
            if tokens == 0:
                self._release(state)
                return
            first = state.computed // self._block_tokens
            end = first + tokens // self._block_tokens
            self._loads[request.request_id] = Load(
                tuple(request.block_hashes[first:end]),
                tuple(tuple(group[first:end]) for group in blocks()),
            )
            state.loading = True
            self._counters.add("hit_tokens", tokens)

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Of so many tokens to be loaded, how many come from each tier."""
        state = self._requests.get(request.request_id)
        found: dict[str, int] = {}
        if state is not None:
            begin, end = state.computed, state.computed + tokens
            for run in state.runs:
                low = max(begin, run.start * self._block_tokens)
                high = min(end, run.end * self._block_tokens)
                if low < high:
                    found[run.tier] = found.get(run.tier, 0) + high - low
        return found

    def build(self, output: Any) -> Step:
        """The orders of this step."""
        with self._counters.call():
            self._drain()
            self._number += 1
            preempted = frozenset(output.preempted_req_ids or ())
            for name in preempted:
                if name in self._requests:
                    self._forget(self._requests[name])
            step = Step(
                self._number,
                self._identity,
                self._plan,
                loads=self._loads,
                saves=list(self._saves(output)),
                preempted=preempted,
                finished=frozenset(self._owed),
            )
            self._loads, self._owed = {}, set()
            return step

    def update(self, received: Collection[str], progress: Progress | None) -> None:
        """What the workers say after a step."""
        with self._counters.call():
            if progress is not None:
                self._read_through = max(self._read_through, progress.read_through)
                self._workers_busy = progress.is_busy
                for name, good in progress.failed.items():
                    self._counters.add("loads_short")
                    if name in self._requests:
                        self._fell_short(self._requests[name], good)
            for name in received:
                state = self._requests.get(name)
                if state is not None:
                    state.loading = False
                    self._release(state)

    def finished(self, request: Any) -> bool:
        """The request is over. Whether its blocks must be kept until the workers have read them."""
        with self._counters.call():
            state = self._requests.pop(request.request_id, None)
            if state is None:
                return False
            self._forget(state)
            # Blocks that are being loaded into are kept by the engine itself.
            if state.loading or state.last_save <= self._read_through:
                return False
            self._owed.add(request.request_id)
            return True

    def is_busy(self) -> bool:
        """Whether workers need more steps: to read what is to be saved, or to see it stored."""
        return bool(self._owed) or self._last_save > self._read_through or self._workers_busy

    def reset(self) -> None:
        """What was stored so far counts no more, for this engine: its weights may have changed."""
        if self._identity is not None:
            weights = f"{self._identity.weights}+{uuid.uuid4().hex}"
            self._open(replace(self._identity, weights=weights))
            for state in self._requests.values():
                if not state.loading:
                    self._forget(state)
        log.warning("kvstrata: the cache was reset: blocks are shared with other engines no more")

    def close(self) -> None:
        """Ends its connection."""
        for state in self._requests.values():
            self._release(state)
        self._link.close()

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request)
        return state

    def _open(self, identity: Identity) -> None:
        self._identity, self._space = identity, self._link.open(identity)

    def _asked(self, state: _Request) -> bool:
        """Sees to it that there is an answer, or that there will be one; whether so."""
        now = time.monotonic()
        if state.known:
            # What was found may be gone when its lease is.
            if state.asked_at is None or now - state.asked_at < LEASE_SECONDS / 2:
                return True
            self._forget(state)
        if state.asked_at is not None:
            if state.again_at is not None and now >= state.again_at:
                return self._lookup(state)
            if now - state.asked_at < self._link.settings.load_timeout * 2:
                return True
            self._counters.add("lookup_unanswered")
            self._forget(state)
            state.barred = True
            return False
        state.asked_at = now
        return self._lookup(state)

    def _lookup(self, state: _Request) -> bool:
        state.again_at = None
        state.turn += 1
        hashes = state.request.block_hashes
        if self._space is not None and hashes:
            tag = (state, state.turn)
            if self._space.lookup(_packed(hashes), lease=LEASE_SECONDS, tag=tag):
                self._counters.add("lookups")
                return True
            self._counters.add("not_ready_blocks", len(hashes))
        # Known for now, and asked again if it has to queue for long.
        state.known, state.found = True, 0
        return True

    def _drain(self) -> None:
        for done in self._link.finished():
            if done.verb == "lookup":
                self._answer(done)

    def _answer(self, done: Done) -> None:
        state, turn = done.tag
        found: Lookup | None = done.result
        if turn != state.turn or state.known:
            if found is not None:
                self._link.release(found.lease)
            return
        self._release(state)
        if found is None:
            state.known = True
            return
        state.lease = found.lease
        state.runs = found.runs
        state.found = 0
        for run in found.runs:
            if run.start > state.found:
                break
            if not is_near(run):
                if self._awaits(state, found, run):
                    return
                break
            state.found = run.end
        state.known = True
        self._count(state)

    def _count(self, state: _Request) -> None:
        counters, total = self._counters, len(state.request.block_hashes)
        for run in state.runs:
            if run.end <= state.found:
                counters.add(f"hit_{run.tier}_blocks", run.end - run.start)
        if state.fetched is not None and state.fetched < state.found:
            counters.add("prefetched_blocks", state.found - state.fetched)
        if state.found < total:
            counters.add("miss_blocks", total - state.found)

    def _awaits(self, state: _Request, found: Lookup, run: Run) -> bool:
        """Whether this run is waited for: it is being put, or is moved here from object."""
        settings = self._link.settings
        assert state.asked_at is not None and self._space is not None
        patience = settings.timeout if run.pending else settings.load_timeout
        now = time.monotonic()
        # Only the server that is asked brings its blocks nearer.
        if now - state.asked_at >= patience or not (run.pending or run.local):
            return False
        if not run.pending and state.fetched is None:
            wanted = _packed(state.request.block_hashes[run.start : found.prefix_blocks])
            if not self._space.prefetch(wanted, tag=(state, state.turn)):
                return False
            state.fetched = run.start
        state.again_at = now + AGAIN_SECONDS
        return True

    def _saves(self, output: Any) -> Iterator[Save]:
        if not self._may_save or self._space is None or not self._space.ready:
            return
        for name, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(name)
            if state is None:
                continue
            request = state.request
            end = min(
                (request.num_computed_tokens + tokens) // self._block_tokens,
                len(request.block_hashes),
            )
            if self._prompt_only:
                end = min(end, request.num_prompt_tokens // self._block_tokens)
            if state.saved is None:
                state.saved = state.found
            if end <= state.saved:
                continue
            blocks = output.kv_connector_block_state.get_block_ids(name)
            if blocks is None:
                continue
            yield from _runs_of(request, blocks, state.saved, end)
            state.saved = end
            state.last_save = self._last_save = self._number

    def _fell_short(self, state: _Request, good: int) -> None:
        state.barred = True
        state.saved = state.computed // self._block_tokens + good

    def _forget(self, state: _Request) -> None:
        """As if it had never been looked up: it is over, or begins anew."""
        self._release(state)
        state.turn += 1
        state.asked_at = state.again_at = state.saved = None
        state.known, state.fetched = False, None
        state.found, state.runs = 0, []

    def _release(self, state: _Request) -> None:
        self._link.release(state.lease)
        state.lease = None


def _packed(hashes: Iterable[bytes]) -> bytearray:
    """One after another, as a link takes them fastest."""
    return bytearray().join(hashes)


def _runs_of(request: Any, blocks: Sequence[Sequence[int]], start: int, end: int) -> Iterable[Save]:
    """Saves of blocks `start` to before `end`, without those that a group has let go of."""
    hashes = request.block_hashes
    while start < end:
        held = [group[start:end] for group in blocks]
        gaps = [group.index(NULL_BLOCK) for group in held if NULL_BLOCK in group]
        stop = start + min(gaps) if gaps else end
        if stop > start:
            yield Save(
                request.request_id,
                hashes[start - 1] if start else None,
                tuple(hashes[start:stop]),
                tuple(tuple(group[: stop - start]) for group in held),
            )
        start = stop + 1
