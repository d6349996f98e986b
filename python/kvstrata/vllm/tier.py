"""kvstrata as a secondary tier of vLLM's `OffloadingConnector` with `TieringOffloadingSpec`.

vLLM's scheduler makes it and calls it in its own thread, where nothing may wait: what is asked is
begun here, and what has ended is taken once a step. Whatever goes wrong is a miss, counted, and
vLLM computes the blocks itself.

    lookup            Lookups: gathered in a step, asked in one batch, leased
    submit_load       Transfers: straight into rows of vLLM's primary tier
    submit_store      Transfers: straight from them
    get_finished_jobs takes what has ended, once a step
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .. import Lease
from ..engines import Counters, Link, Settings
from .identity import caller_config, identities
from .lookups import HIT, MISS, Lookups, split_key
from .stats import Stats, definitions
from .transfers import Finished, Job, Transfers

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

__all__ = ["KvstrataTier"]

log = logging.getLogger("kvstrata")

_ALSO = ("weights", "lora")
"""What the tier can be told beside `Settings`: see docs/engines/vllm.md."""
_POLL = 0.05
"""Seconds between looks while draining, should a wake-up be missed."""
_SHUTDOWN = 5.0
"""Seconds that the end of an engine waits for stores."""


class KvstrataTier(SecondaryTierManager):
    """See the module."""

    medium = Medium.STORAGE
    # A hit may come from memory, flash or a bucket, of any node.
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **given: Any,
    ) -> None:
        """Raises `kvstrata.InvalidError` if a setting or the model cannot be served."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings, also = Settings.parse(given, _ALSO)
        row = self.block_size_bytes
        wanted = identities(offloading_spec.config, caller_config(), row, also)
        self._counters = Counters()
        self._stats = Stats(self._counters)
        self._bytes = primary_kv_view.cast("B")
        self._rows = [self._bytes[at : at + row] for at in range(0, len(self._bytes), row)]
        self._link = Link(settings, self._counters, "vllm")
        self._tokens = {group: each.block_tokens for group, each in wanted.items()}
        self._spaces = {group: self._link.open(each) for group, each in wanted.items()}
        self._lookups = Lookups(self._link, self._spaces)
        self._transfers = Transfers(self._link, self._spaces, self._rows)
        self._loads: dict[str, int] = {}
        self._results: list[JobResult] = []

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks that are in vLLM's primary tier already were offered before."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the block is there; unknown until the batch of this step was answered."""
        with self._counters.call(often=True):
            position = req_context.get_offload_key_position(key) or 0
            verdict = self._lookups.verdict(req_context.req_id, key, position)
        if verdict == HIT:
            return LookupResult.HIT
        return LookupResult.MISS if verdict == MISS else LookupResult.RETRY

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Looks up what the step asked for."""
        with self._counters.call():
            self._lookups.flush()

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begins to fill rows of the primary tier."""
        with self._counters.call():
            request_id = job_metadata.req_context.req_id
            self._loads[request_id] = self._loads.get(request_id, 0) + 1
            self._transfers.begin(
                Job(
                    job_metadata.job_id,
                    request_id,
                    is_load=True,
                    keys=list(job_metadata.keys),
                    rows=job_metadata.chunk_ids.tolist(),
                    lease_of=partial(self._lease_of, request_id),
                )
            )

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begins to put rows of the primary tier. vLLM hands over a set: here it is ordered."""
        with self._counters.call():
            position_of = job_metadata.req_context.get_offload_key_position
            rows = job_metadata.chunk_ids.tolist()
            blocks = sorted(
                (position_of(key) or 0, key, row)
                for key, row in zip(job_metadata.keys, rows, strict=True)
            )
            request_id = job_metadata.req_context.req_id
            self._transfers.begin(
                Job(
                    job_metadata.job_id,
                    request_id,
                    is_load=False,
                    keys=[key for _, key, _ in blocks],
                    rows=[row for _, _, row in blocks],
                    parent_of=partial(self._parent_of, job_metadata.req_context),
                )
            )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Takes what has ended since the last step."""
        with self._counters.call():
            self._take()
            results, self._results = self._results, []
            return results

    def has_pending_work(self) -> bool:
        """While something is under way vLLM keeps stepping, so that its end is seen."""
        return self._transfers.is_busy or self._lookups.is_busy or bool(self._results)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Finished or aborted: gives up its leases. Its jobs go on and are reported."""
        with self._counters.call():
            self._lookups.forget(req_context.req_id)

    def drain_jobs(self) -> None:
        """Waits until no row is in use, as vLLM asks for; every request has a deadline."""
        self._drain(None)

    def shutdown(self) -> None:
        """Waits for stores that are under way, then lets go of vLLM's memory."""
        self._drain(_SHUTDOWN)
        self._link.close()
        self._drain(1.0)
        for view in (*self._rows, self._bytes):
            try:
                view.release()
            except BufferError:
                log.warning("kvstrata: a transfer still has memory of vLLM's primary tier")
                break

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of `get_stats`."""
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last time."""
        is_ready = all(space.ready for space in self._spaces.values())
        return self._stats.take(is_ready=is_ready)

    def _take(self) -> None:
        for done in self._link.finished():
            if done.verb == "lookup":
                self._lookups.ended(done)
            elif done.verb in ("load", "store"):
                self._transfers.ended(done)
        self._results += [self._result(finished) for finished in self._transfers.proceed()]

    def _result(self, finished: Finished) -> JobResult:
        job = finished.job
        if job.is_load:
            self._lookups.lost(job.request_id, finished.failed, is_away=job.is_away)
            self._loads[job.request_id] -= 1
            if not self._loads[job.request_id]:
                del self._loads[job.request_id]
                self._lookups.loaded(job.request_id)
        return JobResult(
            job_id=job.id,
            success=not finished.failed,
            successful_keys=cast("list[OffloadKey]", finished.moved) if finished.failed else None,
            transfer_time=finished.seconds,
            transfer_bytes=len(finished.moved) * self.block_size_bytes,
        )

    def _drain(self, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        while self._transfers.is_busy and (end is None or time.monotonic() < end):
            select.select([self._link], [], [], _POLL)
            self._take()

    def _lease_of(self, request_id: str, key: bytes) -> Lease | None:
        return self._lookups.lease_of(request_id, key)

    def _parent_of(self, req_context: ReqContext, key: bytes) -> bytes | None:
        group, _ = split_key(key)
        end = req_context.get_offload_key_position(OffloadKey(key)) or 0
        return self._lookups.hash_at(req_context.req_id, group, end - self._tokens[group])
