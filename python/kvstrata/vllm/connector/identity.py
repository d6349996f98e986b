"""What the connector serves, and under which name: found out from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ... import InvalidError
from ...engines import Identity
from ..identity import of_engine
from ..versions import check as release
from .plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["ALSO", "Options", "check", "identify"]

_STAGING_BYTES = 256 << 20
_STAGING_BYTES_MAX = 64 << 30

ALSO = ("weights", "lora", "staging_bytes")
"""What the connector can be told beside `Settings`: see docs/engines/vllm.md."""


@dataclass(frozen=True, slots=True)
class Options:
    """The connector's own settings.

    - `staging_bytes`: host memory of each worker through which blocks go, half of it for loads;
      default 256 MiB: as much as is under way while the next pieces are copied.
    """

    model: Mapping[str, Any]
    staging_bytes: int

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Raises `InvalidError`, which names the field, the value and what is allowed."""
        staging = given.get("staging_bytes", _STAGING_BYTES)
        if isinstance(staging, bool) or not isinstance(staging, int):
            raise InvalidError(f"staging_bytes: {staging!r} given, a whole number allowed")
        if not 0 < staging <= _STAGING_BYTES_MAX:
            raise InvalidError(f"staging_bytes: {staging} given, 1 to {_STAGING_BYTES_MAX} allowed")
        return cls({key: given[key] for key in given if key != "staging_bytes"}, staging)


def check(config: VllmConfig, caches: KVCacheConfig) -> int:
    """The tokens of a block. Raises `InvalidError` if this engine cannot be served."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    transfer, parallel = config.kv_transfer_config, config.parallel_config
    assert transfer is not None
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise InvalidError(
            f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} given, 'recompute' "
            "allowed: with any other a block that cannot be loaded fails its request"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise InvalidError(f"{name}: {getattr(parallel, name)} given, 1 allowed")
    served = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
    sizes = set()
    for number, group in enumerate(caches.kv_cache_groups):
        for spec in iter_layer_specs(group.kv_cache_spec):
            sizes.add(spec.block_size)
            if type(spec) not in served or group.host_resident or not group.enable_kv_transfer:
                raise InvalidError(
                    f"model: its cache group {number} is kept as {type(spec).__name__}, and "
                    "KvstrataConnector serves full, latent (MLA) and sliding-window attention; "
                    "use OffloadingConnector with the tier KvstrataTier"
                )
    if len(sizes) != 1:
        raise InvalidError(
            f"model: its cache groups have blocks of {sorted(sizes)} tokens, and KvstrataConnector "
            "serves one size; use OffloadingConnector with the tier KvstrataTier"
        )
    tokens = int(sizes.pop())
    hashed = caches.hash_block_size
    if hashed not in (None, tokens):
        raise InvalidError(f"prefix_match_unit: {hashed} given, {tokens} or nothing allowed")
    return tokens


def identify(config: VllmConfig, block_tokens: int, options: Options) -> Callable[[Plan], Identity]:
    """What names the bytes of this engine, given the parts that its workers have."""
    shared, parallel = of_engine(config, options.model), config.parallel_config
    model, stored = config.model_config, config.cache_config.cache_dtype
    dtype = str(model.dtype if stored == "auto" else stored).removeprefix("torch.")

    def name(plan: Plan) -> Identity:
        return Identity(
            **shared,
            model=str(model.model),
            dtype=dtype,
            block_tokens=block_tokens,
            parts=plan.parts,
            layout=f"connector/{release()}/{plan.layout}",
            split=f"tp:{parallel.tensor_parallel_size},pp:{parallel.pipeline_parallel_size}",
        )

    return name
