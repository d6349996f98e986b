"""What the tier counts, in the form that vLLM exports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engines import Counters
from ..engines.counters import CALL_BUDGET

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata

__all__ = ["Stats", "definitions"]

BLOCKS = "vllm:kv_offload_kvstrata_blocks"
EVENTS = "vllm:kv_offload_kvstrata_events"
CALL = "vllm:kv_offload_kvstrata_call_seconds"
SLOWEST = "vllm:kv_offload_kvstrata_call_seconds_max"
READY = "vllm:kv_offload_kvstrata_ready"
_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, CALL_BUDGET, 3e-3, 1e-2, 1e-1)
_SUFFIX = "_blocks"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics, as vLLM wants them declared."""
    from vllm.v1.kv_offload.base import (
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
    )

    return {
        BLOCKS: OffloadingCounterMetadata(
            documentation="Blocks by what became of them at kvstrata.", labelnames=("outcome",)
        ),
        EVENTS: OffloadingCounterMetadata(
            documentation="Calls and requests of the kvstrata tier by what became of them.",
            labelnames=("event",),
        ),
        CALL: OffloadingHistogramMetadata(
            documentation=(
                "Time that a call of the scheduler spent in the kvstrata tier, in seconds; of the "
                "lookups of a step the longest."
            ),
            buckets=_BUCKETS,
        ),
        SLOWEST: OffloadingGaugeMetadata(
            documentation="Longest that a call of the scheduler spent in the kvstrata tier, in s."
        ),
        READY: OffloadingGaugeMetadata(
            documentation="1 while kvstrata can be used, 0 while all blocks are misses."
        ),
    }


class Stats:
    """What was counted since vLLM asked for it last."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._told: dict[str, int] = {}

    def take(self, *, is_ready: bool) -> OffloadingConnectorStats:
        """The differences since the last time."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        stats = OffloadingConnectorStats()
        sums = self._counters.snapshot()
        for name, total in sums.items():
            grown = total - self._told.get(name, 0)
            if grown and name.endswith(_SUFFIX):
                stats.increase_counter(BLOCKS, grown, (name.removesuffix(_SUFFIX),))
            elif grown:
                stats.increase_counter(EVENTS, grown, (name,))
        self._told = sums
        for took in self._counters.take_calls():
            stats.observe_histogram(CALL, took)
        stats.set_gauge(SLOWEST, self._counters.slowest)
        stats.set_gauge(READY, int(is_ready))
        return stats
