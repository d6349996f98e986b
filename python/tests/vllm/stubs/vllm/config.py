"""The parts of an engine's configuration that decide what its blocks are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The model."""

    model: str = "example/model"
    revision: str | None = "c0ffee" + "0" * 34
    quantization: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class CacheConfig:
    """The cache."""

    prefix_caching_hash_algo: str = "sha256_cbor"


@dataclass
class LoRAConfig:
    """That there are LoRA adapters."""


@dataclass
class SpeculativeConfig:
    """The model that drafts tokens."""

    method: str = "eagle"
    model: str = "example/drafter"


@dataclass
class VllmConfig:
    """All of it."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    lora_config: LoRAConfig | None = None
    speculative_config: SpeculativeConfig | None = None
