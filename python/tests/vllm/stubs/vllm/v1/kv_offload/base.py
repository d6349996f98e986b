"""What the scheduler, the connector and the tiers say to each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, NewType

from .config import OffloadingConfig

OffloadKey = NewType("OffloadKey", bytes)


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """A hash and the group it is meant for."""
    return OffloadKey(block_hash + group_idx.to_bytes(4, "big"))


class Medium(Enum):
    """What a tier stores on."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(Enum):
    """What is known of a block."""

    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class ReqContext:
    """A request, as a tier sees it."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _positions: dict[OffloadKey, int] = field(default_factory=dict)

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None:
        """The scheduler says where a block ends."""
        self._positions[key] = end_token

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        """Where a block ends."""
        return self._positions.get(key)


@dataclass
class RequestOffloadingContext:
    """How a request's blocks are offered."""


class ScheduleEndContext(NamedTuple):
    """What a step has done."""

    new_req_ids: Collection[str] = ()
    preempted_req_ids: Collection[str] = ()


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    """A metric."""

    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    """A counter."""


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    """A gauge."""


@dataclass(frozen=True)
class OffloadingHistogramMetadata(OffloadingMetricMetadata):
    """A histogram."""

    buckets: tuple[float, ...] | None = None


class OffloadingSpec:
    """Has the configuration."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.config = config
