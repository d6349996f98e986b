"""What must be equal for two SGLang engines to share pages.

Of all this SGLang's own keys have the tokens only, and since 0.5.20 salts, extra keys and LoRA
adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from .. import InvalidError
from ..engines import Identity
from ..engines.identity import digest
from ..engines.weights import weights_of
from . import engine
from .pages import Pages

__all__ = ["Place", "identity_of"]

_BYTES_ONLY = ("torch.uint8", "torch.int8")
"""Types of pools that hide what their elements are."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which share of each page a rank has."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    is_mla: bool

    @classmethod
    def of(cls, config: Any) -> Self:
        """The place that SGLang's storage config describes."""
        return cls(
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=getattr(config, "attn_cp_rank", 0),
            cp_size=getattr(config, "attn_cp_size", 1),
            is_mla=config.is_mla_model,
        )

    @property
    def shares_blocks(self) -> bool:
        """Whether the ranks of the tensor-parallel group have parts of the same blocks.

        With context parallelism the shares do not follow from the ranks, so each has blocks alone.
        """
        return not self.is_mla and self.cp_size == 1

    @property
    def is_replica(self) -> bool:
        """Whether the first rank of the group has the same bytes, and stores them."""
        return self.is_mla and self.cp_size == 1 and self.tp_rank > 0

    def __str__(self) -> str:
        """For logs, and as the client's name."""
        return f"tp{self.tp_rank}/{self.tp_size}-pp{self.pp_rank}/{self.pp_size}-cp{self.cp_rank}"


def identity_of(
    config: Any, place: Place, pages: Pages, said: Mapping[str, Any]
) -> tuple[Identity, list[int]]:
    """The namespace of these pages, and which of its parts are this rank's.

    Piece `n` of a page of rank `r` is the part (n, r). Raises `InvalidError` for what is not known.
    """
    ranks = place.tp_size if place.shares_blocks else 1
    own = place.tp_rank if place.shares_blocks else 0
    parts = tuple(
        (piece, rank, size) for piece, size in enumerate(pages.sizes) for rank in range(ranks)
    )
    speculative = engine.server_argument("speculative_algorithm")
    identity = Identity(
        model=config.model_name,
        engine="sglang",
        dtype=_dtype(pages, said),
        block_tokens=pages.tokens,
        parts=parts,
        # Some speculation hashes pairs of tokens.
        hash_algorithm="sglang-sha256" + (f"-{speculative}".lower() if speculative else ""),
        weights=_weights(said),
        layout=_layout(place, pages),
        split="heads" if ranks > 1 else "none",
    )
    return identity, [piece * ranks + own for piece in range(len(pages.sizes))]


def _weights(said: Mapping[str, Any]) -> str:
    """What tells these weights from others of the same name."""
    model, revision = (engine.server_argument(name) for name in ("model_path", "revision"))
    shaping = ("quantization", "json_model_override_args")
    fields: dict[str, object] = {name: repr(engine.server_argument(name)) for name in shaping}
    fields["weights"] = weights_of(said.get("weights"), model, revision, "SGLang")
    return digest(fields)


def _layout(place: Place, pages: Pages) -> str:
    said = [f"hicache-1 {pages.layout()} tp={place.tp_size} pp={place.pp_rank}/{place.pp_size}"]
    if place.cp_size > 1:
        said.append(f"cp={place.cp_rank}/{place.cp_size} of tp={place.tp_rank}")
    scales = engine.server_argument("quantization_param_path")
    if scales:
        said.append(f"scales={scales}")
    return " ".join(said)


def _dtype(pages: Pages, said: Mapping[str, Any]) -> str:
    """What the elements are, where the pool may know them as bytes only."""
    stored = str(pages.pool.dtype)
    named = said.get("dtype") or engine.server_argument("kv_cache_dtype")
    if named not in (None, "auto"):
        if not isinstance(named, str):
            raise InvalidError(f"dtype: {named!r} given, a text allowed")
        return named
    if stored in _BYTES_ONLY:
        raise InvalidError(
            f"dtype: the pool has {stored}, which hides what its elements are; say which, such as "
            '"dtype": "fp8_e4m3"'
        )
    return stored.removeprefix("torch.")
