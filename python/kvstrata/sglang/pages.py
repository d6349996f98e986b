"""Where the pages of SGLang's host memory pool are, and what shapes their bytes.

A page is some tokens of all layers of one rank. Where the pool keeps it in a few pieces (K and V
with the layouts `page_first`, `page_first_direct` and `page_head`, one piece with MLA), each is a
part of a block and moves between the pool and kvstrata without a copy. With `layer_first` it lies
in two pieces for each layer; then the pool gathers it into one part, and spreads it again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .. import InvalidError

__all__ = ["Pages", "pages_of"]

_ZERO_COPY = ("page_first", "page_first_direct", "page_head")
_GATHERED = ("layer_first",)
_PIECES_MAX = 8
"""Pieces of a page that are parts of their own: K, V, and their scales."""
_GEOMETRY = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "head_group_num",
    "storage_format_tag",
)
"""Attributes of pools that say what a page is made of; no pool has them all."""


class Pages:
    """Pages that lie in the pool in few pieces, which are handed over where they lie."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.tokens = int(pool.page_size)
        self.sizes = self._sizes()

    def _sizes(self) -> tuple[int, ...]:
        first = _Indices(range(self.tokens))
        return tuple(int(size) for size in self.pool.get_page_buffer_meta(first)[1])

    def buffers(self, indices: Any, pages: int) -> list[Any]:
        """The memory of these pages, piece by piece. Raises `ValueError` if it is not as declared.

        `indices` are token positions in the pool, `tokens` for each page, as SGLang gives them.
        """
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        if tuple(sizes) != self.sizes * pages or len(pointers) != len(sizes):
            raise ValueError(f"indices: {len(sizes)} pieces given, {pages} pages asked for")
        return [
            _memory(size).from_address(pointer)
            for pointer, size in zip(pointers, sizes, strict=True)
        ]

    def rooms(self, indices: Any, pages: int) -> list[Any]:
        """The memory that these pages are to be loaded into."""
        return self.buffers(indices, pages)

    def landed(self, indices: Any, rooms: Sequence[Any], pages: int) -> None:
        """The first `pages` of them are in `rooms` now."""

    def layout(self) -> str:
        """Everything about the pool that decides what a byte of a page means."""
        pool = self.pool
        given = {name: getattr(pool, name, None) for name in _GEOMETRY}
        said = " ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        return f"{type(pool).__name__} {pool.layout} {pool.dtype} {said}"


class _GatheredPages(Pages):
    """Pages in many pieces: each is gathered into memory of its own, and spread from there."""

    def _sizes(self) -> tuple[int, ...]:
        page = self.pool.get_dummy_flat_data_page()
        return (int(page.numel() * page.element_size()),)

    def buffers(self, indices: Any, pages: int) -> list[Any]:
        return [self.pool.get_data_page(first, flat=True) for first in self._firsts(indices, pages)]

    def rooms(self, indices: Any, pages: int) -> list[Any]:
        self._firsts(indices, pages)
        return [self.pool.get_dummy_flat_data_page() for _ in range(pages)]

    def landed(self, indices: Any, rooms: Sequence[Any], pages: int) -> None:
        firsts = self._firsts(indices, len(rooms))
        for first, room in zip(firsts[:pages], rooms[:pages], strict=True):
            self.pool.set_from_flat_data_page(first, room)

    def _firsts(self, indices: Any, pages: int) -> list[int]:
        given = indices.tolist()
        if len(given) != pages * self.tokens:
            raise ValueError(f"indices: {len(given)} given, {pages} pages of {self.tokens}")
        return [int(first) for first in given[:: self.tokens]]


def pages_of(pool: Any) -> Pages:
    """The pages of a host pool. Raises `InvalidError` for a pool that cannot be stored as it is."""
    layout = getattr(pool, "layout", None)
    if layout in _GATHERED:
        return _GatheredPages(pool)
    if layout not in _ZERO_COPY:
        allowed = ", ".join((*_ZERO_COPY, *_GATHERED))
        raise InvalidError(f"--hicache-mem-layout: {layout!r} given, one of {allowed} allowed")
    pages = Pages(pool)
    if not 0 < len(pages.sizes) <= _PIECES_MAX:
        pieces = f"a page has {len(pages.sizes)} pieces, 1 to {_PIECES_MAX} allowed"
        raise InvalidError(f"{type(pool).__name__}: {pieces}")
    return pages


class _Indices(list[int]):
    """Token positions, as far as pools ask for them before there is a tensor of any."""

    def tolist(self) -> list[int]:
        return list(self)


_types: dict[int, type[ctypes.Array[ctypes.c_ubyte]]] = {}
"""One for each length: types of ctypes are never given back."""


def _memory(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    if size not in _types:
        _types[size] = ctypes.c_ubyte * size
    return _types[size]
