"""Which bytes of a cache tensor are one block. Shape and strides are read, never assumed.

A tensor is whatever has `shape`, `stride()`, `element_size()`, `data_ptr()` and `dtype`; its first
dimension counts blocks, or pieces of them where the engine's kernels take smaller blocks than its
scheduler. The bytes of a block are taken in the order in which they lie in memory, so a block that
lies in one piece is copied as one, whatever the engine calls its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ...engines.identity import digest

__all__ = ["Region", "layout_of", "regions_of"]

_NAMES = "HNC"
"""What vLLM calls the dimensions behind that of the blocks: heads, tokens, contents."""


@dataclass(frozen=True, slots=True)
class Region:
    """One layer's share of every block."""

    tensor: Any
    base: int
    """Address of block 0."""
    stride: int
    """Bytes from a block to the next."""
    outer: tuple[tuple[int, int], ...]
    """Count of and bytes between the contiguous pieces of a block, the outermost first."""
    piece_bytes: int
    order: str
    """What a block holds: the type of its numbers and the dimensions, the outermost first."""

    @property
    def pieces(self) -> list[int]:
        """Offsets in a block of its pieces, in the order of memory."""
        steps = [[at * stride for at in range(size)] for size, stride in self.outer]
        return [sum(step) for step in product(*steps)]

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return prod(size for size, _ in self.outer) * self.piece_bytes

    @classmethod
    def of(cls, tensor: Any, blocks: int) -> Region:
        """Reads a tensor that holds so many blocks. Raises `ValueError` if it does not."""
        shape, element = tuple(tensor.shape), tensor.element_size()
        strides = [stride * element for stride in tensor.stride()]
        if not shape or shape[0] % blocks or shape[0] < blocks:
            raise ValueError(f"a cache of {blocks} blocks has the shape {shape}")
        named = [*zip(_named(len(shape) - 1), shape[1:], strides[1:], strict=True)]
        split = shape[0] // blocks
        if split > 1:
            named.insert(0, ("K", split, strides[0]))
        dimensions = sorted((each for each in named if each[1] > 1), key=lambda each: -each[2])
        order = " ".join([str(tensor.dtype), *(f"{name}{size}" for name, size, _ in dimensions)])
        piece = element
        while dimensions and dimensions[-1][2] == piece:
            piece *= dimensions.pop()[1]
        outer = tuple((size, stride) for _, size, stride in dimensions)
        return cls(tensor, tensor.data_ptr(), strides[0] * split, outer, piece, order)


def _named(count: int) -> Iterable[str]:
    return _NAMES if count == len(_NAMES) else (f"D{at}:" for at in range(count))


def regions_of(
    caches: dict[str, Any], groups: Sequence[Sequence[str]], blocks: int
) -> tuple[tuple[Region, ...], ...]:
    """The regions of each cache group, in the order of its layers.

    Layers that use the cache of another layer are not taken twice.
    """
    found = []
    for layers in groups:
        taken: dict[int, Region] = {}
        for layer in layers:
            if layer in caches:
                region = Region.of(caches[layer], blocks)
                taken.setdefault(region.base, region)
        found.append(tuple(taken.values()))
    return tuple(found)


def layout_of(groups: Iterable[Sequence[Region]]) -> str:
    """Equal for two workers just if the bytes of a part mean the same to both."""
    orders = [[region.order for region in regions] for regions in groups]
    text = "|".join(
        f"{len(set(orders))}:{digest({str(at): each for at, each in enumerate(orders)})}"
        if len(set(orders)) > 1
        else f"{len(orders)}x {orders[0]}"
        for orders in orders
        if orders
    )
    return text
