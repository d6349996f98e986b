"""The parts of an engine's configuration that decide what its blocks are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The model."""

    model: str = "example/model"
    dtype: str = "torch.bfloat16"
    revision: str | None = "c0ffee" + "0" * 34
    quantization: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class CacheConfig:
    """The cache."""

    prefix_caching_hash_algo: str = "sha256_cbor"
    cache_dtype: str = "auto"


@dataclass
class LoRAConfig:
    """That there are LoRA adapters."""


@dataclass
class SpeculativeConfig:
    """The model that drafts tokens."""

    method: str = "eagle"
    model: str = "example/drafter"


@dataclass
class ParallelConfig:
    """Over how many workers it is spread, and which of them this is."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1


@dataclass
class KVTransferConfig:
    """Where blocks are kept outside."""

    kv_role: str = "kv_both"
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_kv_producer(self) -> bool:
        """Whether it stores."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it loads."""
        return self.kv_role in ("kv_consumer", "kv_both")


@dataclass
class VllmConfig:
    """All of it."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    lora_config: LoRAConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    kv_transfer_config: KVTransferConfig | None = None
