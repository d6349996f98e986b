"""How an engine keeps the blocks of its layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KVCacheSpec:
    """Of one layer."""

    block_size: int = 16


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """All tokens."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """All tokens, latent."""


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """The last tokens."""

    sliding_window: int = 128


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A state."""


@dataclass
class KVCacheGroupSpec:
    """Layers with the same blocks."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    host_resident: bool = False
    enable_kv_transfer: bool = True


@dataclass
class KVCacheConfig:
    """Of all layers."""

    num_blocks: int = 8
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)
    hash_block_size: int | None = None
    kv_tp_replicas: int = 1


def iter_layer_specs(kv_cache_spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    """The layers of a group that has one for each."""
    return (kv_cache_spec,)
