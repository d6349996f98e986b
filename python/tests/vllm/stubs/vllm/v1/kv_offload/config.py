"""What vLLM tells a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OffloadingGroupConfig:
    """Layers that share a cache."""

    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("layers.0", "layers.1")
    group_id: int = 0


@dataclass(frozen=True)
class OffloadingModelConfig:
    """The model."""

    name: str = "example/model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class OffloadingCacheConfig:
    """Sizes."""

    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class OffloadingParallelConfig:
    """Parallel sizes."""

    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class OffloadingConfig:
    """All of it."""

    groups: tuple[OffloadingGroupConfig, ...] = (OffloadingGroupConfig(),)
    worker_kv_bytes_per_block: int = 4096
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    model: OffloadingModelConfig = OffloadingModelConfig()
    cache: OffloadingCacheConfig = OffloadingCacheConfig()
    parallel: OffloadingParallelConfig = OffloadingParallelConfig()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"
