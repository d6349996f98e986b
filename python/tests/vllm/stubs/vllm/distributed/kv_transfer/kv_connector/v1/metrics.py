"""What a connector counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVConnectorStats:
    """Values since the last time."""

    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    """What is exported."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._gauge_cls: Any = metric_types["gauge"]  # type: ignore[index]
        self._counter_cls: Any = metric_types["counter"]  # type: ignore[index]
        self.per_engine_labelvalues = per_engine_labelvalues
