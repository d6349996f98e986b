"""What may share blocks, found out from vLLM's configuration.

vLLM's block hashes cover tokens, salts, pictures, and LoRA adapters by name; everything else that
shapes the bytes of a block is put into the namespace here. What cannot be found out is refused: an
engine that starts with the wrong name for its bytes would read those of another.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from .. import InvalidError
from ..engines import Identity
from ..engines.identity import digest
from ..engines.weights import weights_of
from .versions import check

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["ROW_BYTES_MAX", "caller_config", "identities", "of_engine"]

ROW_BYTES_MAX = 64 << 20
"""The longest block that a server takes."""
ALGORITHMS = ("sha256", "sha256_cbor")
"""The others of vLLM's can be made to collide, and a collision is another prompt's block."""


def caller_config() -> VllmConfig:
    """The configuration of the engine that is making this tier.

    A tier is given an `OffloadingConfig`, which has neither the revision of the weights nor the
    hash algorithm, nor whether there are LoRA adapters. vLLM's scheduler has all of it as an
    argument, `vllm_config`, while it makes the tier.
    """
    from vllm.config import VllmConfig

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if isinstance(config, VllmConfig):
            return config
        frame = frame.f_back
    raise InvalidError("KvstrataTier: it was not made by a scheduler of vLLM")


def identities(
    config: OffloadingConfig, engine: VllmConfig, row_bytes: int, given: dict[str, Any]
) -> dict[int, Identity]:
    """A namespace for each cache group of the model, by its number.

    A row of vLLM's primary tier is one part: the workers' bytes one after another, and padding.
    """
    if not 0 < row_bytes <= ROW_BYTES_MAX:
        raise InvalidError(
            f"block_size: a block has {row_bytes} bytes, 1 to {ROW_BYTES_MAX} are allowed; "
            "set a smaller block_size or blocks_per_chunk in kv_connector_extra_config"
        )
    shared, layout = of_engine(engine, given), _layout(config)
    return {
        group.group_id: Identity(
            **shared,
            model=config.model.name,
            dtype=config.model.dtype,
            block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
            parts=((group.group_id, 0, row_bytes),),
            layout=layout,
            split=f"workers:{config.parallel.world_size}",
        )
        for group in config.groups
    }


def of_engine(engine: VllmConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Identity` that come from the engine's own configuration."""
    algorithm = engine.cache_config.prefix_caching_hash_algo
    if algorithm not in ALGORITHMS:
        allowed = " or ".join(ALGORITHMS)
        raise InvalidError(f"prefix_caching_hash_algo: {algorithm!r} given, {allowed} allowed")
    _check_lora(engine, given.get("lora"))
    return {
        "engine": "vllm",
        "hash_algorithm": algorithm,
        "weights": _weights(engine, given.get("weights")),
        "hash_root": _hash_root(algorithm),
    }


def _layout(config: OffloadingConfig) -> str:
    """All that says which byte of a row is what."""
    parallel = config.parallel
    fields: dict[str, object] = {
        "vllm": check(),
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "world": parallel.world_size,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "pcp": parallel.pcp_size,
        "dcp": parallel.dcp_size,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "groups": tuple(
            (group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in config.groups
        ),
    }
    return f"tiering/{config.kv_cache_layout or 'default'}/{digest(fields)}"


def _hash_root(algorithm: str) -> bytes:
    """The digest of what vLLM's hash chains begin with: another one with another PYTHONHASHSEED."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    hash_of = get_hash_fn_by_name(algorithm)
    return hashlib.sha256(hash_of(resolve_none_hash_seed(hash_of))).digest()


def _check_lora(engine: VllmConfig, given: object) -> None:
    """vLLM's hashes have an adapter's name and path, and not what is in it."""
    if given not in (None, "by_name"):
        raise InvalidError(f"lora: {given!r} given, 'by_name' or nothing allowed")
    if engine.lora_config is not None and given is None:
        raise InvalidError(
            "lora: LoRA is on, and vLLM tells adapters apart by name and path only; set "
            "'lora': 'by_name' if a name and path mean the same weights wherever they are used"
        )


def _weights(engine: VllmConfig, given: object) -> str:
    """What tells these weights from others of the same name."""
    model = engine.model_config
    drafter = engine.speculative_config
    fields = {
        "weights": weights_of(given, str(model.model), model.revision, "vLLM"),
        "quantization": str(model.quantization),
        "overrides": repr(model.hf_overrides),
        "drafter": None if drafter is None else (str(drafter.method), str(drafter.model)),
    }
    return digest(fields)
