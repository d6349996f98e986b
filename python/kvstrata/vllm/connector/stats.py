"""What the connector counts, in the form that vLLM collects from its processes and exports."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ...engines import Counters

__all__ = ["KvstrataMetrics", "KvstrataStats", "Telling"]

SLOWEST = "slowest_call_us"
"""Of the calls on the scheduler's thread, in microseconds. All else are sums."""
_BLOCKS = "_blocks"


class KvstrataStats(KVConnectorStats):
    """Sums by name since the last time, of one process or of several."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begins anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds those of another process, or of a later time."""
        for name, value in other.data.items():
            mine = self.data.get(name, 0)
            self.data[name] = max(mine, value) if name == SLOWEST else mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Telling:
    """The differences of counters from one time to the next."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._told: dict[str, int] = {}

    def take(self) -> KvstrataStats:
        """What was counted since the last time."""
        sums = self._counters.snapshot()
        grown = {name: total - self._told.get(name, 0) for name, total in sums.items()}
        self._told = sums
        data = {name: count for name, count in grown.items() if count}
        if data.get("calls"):
            data[SLOWEST] = round(self._counters.slowest * 1e6)
        return KvstrataStats(data)


class KvstrataMetrics(KVConnectorPromMetrics):
    """`vllm:kvstrata_blocks` by outcome, `vllm:kvstrata_events` by event, and the slowest call."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._blocks = self._counter_cls(
            name="vllm:kvstrata_blocks",
            documentation="Blocks by what became of them at kvstrata.",
            labelnames=[*labelnames, "outcome"],
        )
        self._events = self._counter_cls(
            name="vllm:kvstrata_events",
            documentation="Calls and requests of KvstrataConnector by what became of them.",
            labelnames=[*labelnames, "event"],
        )
        self._slowest = self._gauge_cls(
            name="vllm:kvstrata_slowest_call_microseconds",
            documentation="Longest that a call of the scheduler spent in KvstrataConnector, in us.",
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == SLOWEST:
                self._slowest.labels(*labels).set(value)
            elif name.endswith(_BLOCKS):
                self._blocks.labels(*labels, name.removesuffix(_BLOCKS)).inc(value)
            else:
                self._events.labels(*labels, name).inc(value)
