"""What a secondary tier is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..base import Medium, OffloadingSpec, OffloadKey, ReqContext
from .backpressure import BackpressureDetector


@dataclass
class TransferJob:
    """Blocks to be moved."""

    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: np.ndarray[Any, np.dtype[np.int32]]
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    """What became of them."""

    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    """The base class of tiers."""

    medium: ClassVar[Medium | None] = None
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        self._primary_kv_view = primary_kv_view
        assert primary_kv_view.strides is not None
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type = tier_type

    @property
    def block_size_bytes(self) -> int:
        """Bytes of a row."""
        return self._block_size_bytes
