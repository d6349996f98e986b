"""A scheduler with a primary tier, which calls `KvstrataTier` as vLLM's does.

It follows `TieringOffloadingManager` of vLLM 0.32: results are taken once a step and before the
first lookup of it, hits are loaded at the end of the step in one job, rows belong to a job until it
is reported, and a job is reported exactly once. What a block holds follows from its key.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "stubs"))

from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvstrata.vllm import KvstrataTier

ROW_BYTES = 64 << 10
DEADLINE = 30.0
"""Seconds after which a test gives up."""


def contents(key: bytes) -> bytes:
    """What the block of this key holds."""
    return random.Random(key).randbytes(ROW_BYTES)


class Request:
    """A prompt of whole blocks. Its hashes are a chain, as vLLM's are."""

    numbers = itertools.count()

    def __init__(self, prompt: str, blocks: int, *, salt: str = "", groups: int = 1) -> None:
        self.context = ReqContext(f"{prompt}-{next(self.numbers)}")
        self.keys: dict[int, list[OffloadKey]] = {group: [] for group in range(groups)}
        link = hashlib.sha256(f"root{salt}".encode()).digest()
        for number in range(blocks):
            link = hashlib.sha256(link + f"{prompt}{number}".encode()).digest()
            for group, keys in self.keys.items():
                keys.append(make_offload_key(link, group))
                self.context.set_offload_key_position(keys[-1], (number + 1) * 16)

    @property
    def all_keys(self) -> list[OffloadKey]:
        """Of all groups."""
        return [key for keys in self.keys.values() for key in keys]


class FakeEngine:
    """See the module. Every method returns at once, but for those that say that they wait."""

    def __init__(
        self,
        endpoint: str,
        *,
        rows: int = 256,
        config: OffloadingConfig | None = None,
        engine: VllmConfig | None = None,
        **settings: Any,
    ) -> None:
        # The tier looks for it under this name.
        vllm_config = engine or VllmConfig()
        assert vllm_config is not None
        self.primary = np.zeros((rows, ROW_BYTES), np.int8)
        self.tier = KvstrataTier(
            offloading_spec=OffloadingSpec(config or OffloadingConfig()),
            primary_kv_view=self.primary.data,
            tier_type="KvstrataTier",
            **{"endpoint": endpoint, "timeout": 10.0, **settings},
        )
        self.free = list(range(rows))
        self.rows: dict[OffloadKey, int] = {}
        self.jobs: dict[int, TransferJob] = {}
        self.results: dict[int, JobResult] = {}
        self._job_ids = itertools.count()
        self._promotions: dict[str, tuple[ReqContext, list[OffloadKey]]] = {}
        self._loading: set[OffloadKey] = set()

    @property
    def counts(self) -> dict[str, int]:
        """What the tier has counted."""
        return self.tier._counters.snapshot()

    def ready(self) -> FakeEngine:
        """Waits until the server was reached."""
        self.until(lambda: all(space.ready for space in self.tier._spaces.values()))
        return self

    def lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """As vLLM's manager answers its scheduler."""
        if key in self._loading:
            return LookupResult.HIT_PENDING
        if key in self.rows:
            return LookupResult.HIT
        result = self.tier.lookup(key, context)
        if result is not LookupResult.HIT:
            return result
        if not self.free:
            return LookupResult.MISS
        self.rows[key] = self.free.pop()
        self._loading.add(key)
        self._promotions.setdefault(context.req_id, (context, []))[1].append(key)
        return LookupResult.HIT_PENDING

    def step(self, *asked: tuple[Request, Sequence[OffloadKey]]) -> list[int | None]:
        """One step: how many blocks from the first are there, for each; None if that is open."""
        self._take()
        found: list[int | None] = []
        for request, keys in asked:
            hits, is_open = 0, False
            for key in keys:
                result = self.lookup(key, request.context)
                if result is LookupResult.MISS:
                    break
                is_open |= result is not LookupResult.HIT
                hits += result is LookupResult.HIT
            found.append(None if is_open else hits)
        for context, loading in self._promotions.values():
            self.tier.submit_load(self._job(context, loading, is_promotion=True))
        self._promotions.clear()
        self.tier.on_schedule_end(ScheduleEndContext())
        return found

    def find(self, request: Request, group: int = 0) -> int:
        """Waits for the blocks of a request; how many were loaded, their bytes checked."""
        self.tier.on_new_request(request.context)
        keys = request.keys[group]
        found: list[int | None] = []

        def known() -> bool:
            found[:] = self.step((request, keys))
            return found[0] is not None

        self.until(known)
        hits = found[0]
        assert hits is not None
        for key in keys[:hits]:
            assert self.primary[self.rows[key]].tobytes() == contents(key), "bytes of another block"
        return hits

    def offload(self, request: Request, keys: Sequence[OffloadKey] | None = None) -> int:
        """Has blocks stored; vLLM hands over a set. Returns the job."""
        wanted = set(request.all_keys if keys is None else keys)
        for key in wanted - self.rows.keys():
            self.rows[key] = self.free.pop()
            self.primary[self.rows[key]] = np.frombuffer(contents(key), np.int8)
        job = self._job(request.context, list(wanted), is_promotion=False)
        self.tier.submit_store(job)
        return job.job_id

    def finish(self, request: Request) -> None:
        """The request has ended."""
        self.tier.on_request_finished(request.context)

    def forget(self) -> None:
        """Empties the primary tier."""
        assert not self.jobs
        self.free += self.rows.values()
        self.rows.clear()
        self.primary.fill(0)

    def settle(self) -> None:
        """Waits until nothing is under way."""

        def over() -> bool:
            self.step()
            return not self.jobs and not self.tier.has_pending_work()

        self.until(over)

    def store(self, prompt: str, blocks: int, **of: Any) -> None:
        """Waits until a prompt's blocks are stored, and forgets them."""
        request = Request(prompt, blocks, **of)
        job = self.offload(request)
        self.settle()
        assert self.results[job].success
        self.finish(request)
        self.forget()

    def hits(self, prompt: str, blocks: int, **of: Any) -> int:
        """How many blocks of a prompt are found and loaded by a request that knows nothing yet."""
        request = Request(prompt, blocks, **of)
        found = self.find(request)
        self.settle()
        self.finish(request)
        self.forget()
        return found

    def close(self) -> None:
        """Ends it."""
        self.tier.shutdown()

    def _job(
        self, context: ReqContext, keys: list[OffloadKey], *, is_promotion: bool
    ) -> TransferJob:
        rows = np.array([self.rows[key] for key in keys], np.int32)
        job = TransferJob(next(self._job_ids), keys, rows, is_promotion, context)
        self.jobs[job.job_id] = job
        return job

    def _take(self) -> None:
        for result in self.tier.get_finished_jobs():
            job = self.jobs.pop(result.job_id)
            assert result.job_id not in self.results, "reported twice"
            self.results[result.job_id] = result
            if not job.is_promotion:
                continue
            good = set(job.keys) if result.success else set(result.successful_keys or ())
            assert good <= set(job.keys)
            for key in job.keys:
                self._loading.discard(key)
                if key not in good:
                    self.free.append(self.rows.pop(key))

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds."""
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, "it does not come to hold"
            time.sleep(0.001)
