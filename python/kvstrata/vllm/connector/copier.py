"""Moves blocks between the engine's tensors and slots in host memory.

kvstrata fills and reads the slots; each has room for one block of every cache group. `HostCopier`
serves caches in host memory and needs nothing but their addresses. `DeviceCopier` serves those of a
GPU: through pinned memory, on a stream of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

from ..._tensors import memory_of
from .regions import Region

__all__ = ["Copier", "DeviceCopier", "Fence", "HostCopier", "Move"]

Groups = Sequence[Sequence[Region]]
Move = tuple[int, int, int]
"""Slot, cache group, block."""
Fence = Callable[[], bool]
"""Whether the copies are done. It never waits."""
_ALIGNMENT = 64


class Copier(Protocol):
    """What the worker's half needs."""

    slot_bytes: int

    def room(self, slot: int, group: int) -> memoryview:
        """The host memory of one part."""

    def read(self, moves: Sequence[Move]) -> Fence:
        """From tensors to slots. What the engine does to the blocks after this call is not seen."""

    def write(self, moves: Sequence[Move]) -> Fence:
        """From slots to tensors."""


def _bytes_of(regions: Sequence[Region]) -> int:
    return sum(region.bytes for region in regions)


class _Slots:
    """Where the parts of a slot lie in host memory, which a copier makes."""

    _memory: memoryview

    def __init__(self, groups: Groups) -> None:
        padded = (-(-_bytes_of(regions) // _ALIGNMENT) * _ALIGNMENT for regions in groups)
        *starts, self.slot_bytes = accumulate(padded, initial=0)
        self._parts = [
            (start, _bytes_of(regions)) for start, regions in zip(starts, groups, strict=True)
        ]

    def room(self, slot: int, group: int) -> memoryview:
        """See `Copier`."""
        start, length = self._parts[group]
        start += slot * self.slot_bytes
        return self._memory[start : start + length]


class HostCopier(_Slots):
    """For caches in host memory."""

    def __init__(self, groups: Groups, blocks: int, slots: int) -> None:
        super().__init__(groups)
        self._memory = memoryview(mmap.mmap(-1, max(1, slots * self.slot_bytes)))
        # For each group and contiguous piece: the layer's memory, bytes from a block to the next,
        # offset in a block, offset in a slot, length.
        self._pieces: list[list[tuple[memoryview, int, int, int, int]]] = []
        for (start, _), regions in zip(self._parts, groups, strict=True):
            pieces, at = [], start
            for region in regions:
                layer = _memory(region, blocks)
                for offset in region.pieces:
                    pieces.append((layer, region.stride, offset, at, region.piece_bytes))
                    at += region.piece_bytes
            self._pieces.append(pieces)

    def read(self, moves: Sequence[Move]) -> Fence:
        """See `Copier`."""
        memory = self._memory
        for slot, group, block in moves:
            base = slot * self.slot_bytes
            for layer, stride, offset, at, length in self._pieces[group]:
                source = block * stride + offset
                memory[base + at : base + at + length] = layer[source : source + length]
        return _done

    def write(self, moves: Sequence[Move]) -> Fence:
        """See `Copier`."""
        memory = self._memory
        for slot, group, block in moves:
            base = slot * self.slot_bytes
            for layer, stride, offset, at, length in self._pieces[group]:
                target = block * stride + offset
                layer[target : target + length] = memory[base + at : base + at + length]
        return _done


def _done() -> bool:
    return True


def _memory(region: Region, blocks: int) -> memoryview:
    """All blocks of a layer, as bytes."""
    extent = region.stride * (blocks - 1) + region.pieces[-1] + region.piece_bytes
    array = (ctypes.c_ubyte * extent).from_address(region.base)
    vars(array)["tensor"] = region.tensor
    return memoryview(array).cast("B")


class DeviceCopier(_Slots):
    """For caches in the memory of a GPU.

    Reading gathers on the device, where the engine's own stream waits for it, and goes to the host
    from there while the engine computes. Without a GPU, where tests run it, there are no streams,
    and copies are done when they return.
    """

    def __init__(self, groups: Groups, blocks: int, slots: int) -> None:
        torch = self._torch = import_module("torch")
        self._device = groups[0][0].tensor.device
        super().__init__(groups)
        self._on_gpu = self._device.type != "cpu"
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        self._host = torch.empty(
            (slots, self.slot_bytes), dtype=torch.uint8, pin_memory=self._on_gpu
        )
        self._memory = memoryview(memory_of(self._host)).cast("B")
        self._views = [[self._view(region, blocks) for region in regions] for regions in groups]

    def read(self, moves: Sequence[Move]) -> Fence:
        """See `Copier`."""
        torch = self._torch
        with self._aside():
            scratches = []
            for group, slots, ids in self._by_group(moves):
                length = self._parts[group][1]
                scratch = torch.empty((len(slots), length), dtype=torch.uint8, device=self._device)
                at = 0
                for view, size in self._views[group]:
                    picked = torch.index_select(view, 0, ids).reshape(len(slots), size)
                    scratch[:, at : at + size] = picked
                    at += size
                scratches.append((group, slots, scratch))
            gathered = self._event()
            for group, slots, scratch in scratches:
                start, length = self._parts[group]
                for row, slot in enumerate(slots):
                    self._host[slot, start : start + length].copy_(scratch[row], non_blocking=True)
            copied = self._event()
        if gathered is not None:
            # What the engine computes next may overwrite the blocks: it starts after the gather.
            torch.cuda.current_stream(self._device).wait_event(gathered)
        return self._fence(copied, scratches)

    def write(self, moves: Sequence[Move]) -> Fence:
        """See `Copier`."""
        torch = self._torch
        scratches = []
        with self._aside():
            for group, slots, ids in self._by_group(moves):
                start, length = self._parts[group]
                scratch = torch.empty((len(slots), length), dtype=torch.uint8, device=self._device)
                for row, slot in enumerate(slots):
                    scratch[row].copy_(self._host[slot, start : start + length], non_blocking=True)
                at = 0
                for view, size in self._views[group]:
                    picked = scratch[:, at : at + size].reshape(len(slots), *view.shape[1:])
                    view.index_copy_(0, ids, picked)
                    at += size
                scratches.append(scratch)
            return self._fence(self._event(), scratches)

    def _view(self, region: Region, blocks: int) -> tuple[Any, int]:
        """The bytes of a layer, a block in the first dimension, pieces behind it."""
        torch, tensor = self._torch, region.tensor
        offset = tensor.storage_offset() * tensor.element_size()
        raw = torch.empty(0, dtype=torch.uint8, device=self._device)
        shape = (blocks, *(size for size, _ in region.outer), region.piece_bytes)
        strides = (region.stride, *(stride for _, stride in region.outer), 1)
        return raw.set_(tensor.untyped_storage(), offset, shape, strides), region.bytes

    def _by_group(self, moves: Sequence[Move]) -> Iterator[tuple[int, list[int], Any]]:
        for group in sorted({group for _, group, _ in moves}):
            slots = [slot for slot, at, _ in moves if at == group]
            blocks = [block for _, at, block in moves if at == group]
            ids = self._torch.tensor(blocks, dtype=self._torch.int64)
            yield group, slots, ids.to(self._device, non_blocking=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On our stream, after what the engine has begun so far."""
        if self._stream is None:
            yield
            return
        cuda = self._torch.cuda
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.stream(self._stream):
            yield

    def _event(self) -> Any:
        if self._stream is None:
            return None
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def _fence(self, event: Any, kept: object) -> Fence:
        if event is None:
            return _done

        def done(kept: object = kept) -> bool:
            return bool(event.query())

        return done
