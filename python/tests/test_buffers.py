"""Whose memory bytes go to, what is refused, and for how long it is held."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import BLOCK_BYTES, Start, hashes, open_namespace, store, value

import kvstrata


class Tensor:
    """As much of a tensor of torch as is used: memory without a buffer of Python's kind."""

    def __init__(self, length: int, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.memory = ctypes.create_string_buffer(length)
        self.device = SimpleNamespace(type=device)
        self.contiguous = contiguous

    def is_contiguous(self) -> bool:
        """No gaps."""
        return self.contiguous

    def numel(self) -> int:
        """Elements."""
        return len(self.memory) // 2

    def element_size(self) -> int:
        """Bytes of each: bf16, which no buffer of Python can name."""
        return 2

    def data_ptr(self) -> int:
        """Where they are."""
        return ctypes.addressof(self.memory)


ROOMS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(BLOCK_BYTES),
    "memoryview": lambda: memoryview(bytearray(BLOCK_BYTES + 8))[4:-4],
    "mmap": lambda: mmap.mmap(-1, BLOCK_BYTES),
    "numpy uint8": lambda: np.zeros(BLOCK_BYTES, np.uint8),
    "numpy float16, two dimensions": lambda: np.zeros((BLOCK_BYTES // 256, 128), np.float16),
    "ctypes": lambda: (ctypes.c_char * BLOCK_BYTES)(),
    "tensor": lambda: Tensor(BLOCK_BYTES),
}


def bytes_of(room: Any) -> bytes:
    """What is in it."""
    return room.memory.raw if isinstance(room, Tensor) else bytes(memoryview(room))


@pytest.mark.parametrize("path", ["grpc", "bulk", "unix"])
@pytest.mark.parametrize("kind", ROOMS)
def test_blocks_are_written_into_any_memory_over_each_path(
    start: Start, tmp_path: Any, path: str, kind: str
) -> None:
    """And nowhere else: the neighbours of a view stay as they are."""
    unix = [f"server.bulk_unix={tmp_path}/socket"] if path == "unix" else []
    server = start(*unix)
    way: Any = "grpc" if path == "grpc" else "bulk"
    with kvstrata.Client(server.grpc, path=way) as client:
        namespace = open_namespace(client, kind)
        values = store(namespace, 3)
        rooms = [ROOMS[kind]() for _ in range(4)]
        got = namespace.get_into(hashes(4), rooms)
        assert got.found == [True, True, True, False]
        assert got.lengths == [BLOCK_BYTES] * 3 + [0]
        assert (got.blocks, got.prefix_blocks, got.dram, got.bytes) == (3, 3, 3, 3 * BLOCK_BYTES)
        assert got.misses == [(3, 4, "absent")]
        assert [bytes_of(room) for room in rooms[:3]] == values
        if kind == "memoryview":
            assert bytes(rooms[0].obj[:4]) + bytes(rooms[0].obj[-4:]) == bytes(8)
        again = open_namespace(client, f"{kind}, put")
        assert again.put(hashes(3), rooms[:3]).count("stored") == 3
        assert again.get(hashes(3)) == values


def test_large_blocks_of_several_parts_come_in_pieces(start: Start) -> None:
    """Longer than a frame and a message."""
    lengths = (5 << 20, 3, 1 << 20)
    server = start("memory.limit=1GiB", "dram.capacity=512MiB")
    for way in ("grpc", "bulk"):
        with kvstrata.Client(server.grpc, path=way) as client:
            namespace = open_namespace(client, way, lengths)
            values = [value(number, length) for number, length in enumerate(lengths * 2)]
            assert namespace.put(hashes(2), values).count("stored") == 2
            rooms = [bytearray(length) for length in lengths * 2]
            assert namespace.get_into(hashes(2), rooms).found == [True, True]
            assert rooms == values


def refused() -> dict[str, tuple[list[Any], str]]:
    """Buffers that cannot be written, and what is said of them."""
    one = bytearray(BLOCK_BYTES)
    shared = bytearray(BLOCK_BYTES + 8)
    frozen = np.zeros(BLOCK_BYTES, np.uint8)
    frozen.flags.writeable = False
    return {
        "bytes": ([one, bytes(BLOCK_BYTES)], "buffers: 1 is bytes and read-only"),
        "frozen": ([frozen, one], "buffers: 0 is ndarray and read-only"),
        "gaps": (
            [one, np.zeros(2 * BLOCK_BYTES, np.uint8)[::2]],
            "buffers: 1 is ndarray and not contiguous",
        ),
        "short": (
            [one, bytearray(5)],
            f"position 1, part 0: 5 bytes given, exactly {BLOCK_BYTES} declared",
        ),
        "few": ([one], r"buffers: 1 given, exactly 2 required \(2 blocks x 1 parts\)"),
        "many": ([bytearray(1)] * 3, "buffers: . and . share memory"),
        "twice": ([one, one], "buffers: 0 and 1 share memory, each needs its own"),
        "overlap": (
            [memoryview(shared)[8:], memoryview(shared)[:-8]],
            "buffers: 1 and 0 share memory",
        ),
        "text": ([one, "text"], "buffers: 1 is str and has no buffer: it is neither a buffer nor"),
        "device": (
            [Tensor(BLOCK_BYTES, device="cuda"), one],
            "buffers: 0 is Tensor and has no buffer: it is in the memory of cuda",
        ),
        "strided": (
            [Tensor(BLOCK_BYTES, contiguous=False), one],
            "buffers: 0 is Tensor and has no buffer: it is not contiguous",
        ),
    }


@pytest.mark.parametrize("kind", refused())
def test_refused_buffers_are_named(namespace: kvstrata.Namespace, kind: str) -> None:
    """Before anything is written, and what was good of them is let go."""
    store(namespace, 2)
    buffers, said = refused()[kind]
    with pytest.raises(kvstrata.InvalidError, match=said):
        namespace.get_into(hashes(2), buffers)
    with pytest.raises(kvstrata.InvalidError, match=said):
        namespace.submit_get_into(hashes(2), buffers)
    for buffer in buffers:
        if isinstance(buffer, bytearray):
            buffer.append(0)


def test_a_buffer_is_held_until_its_request_has_ended(start: Start) -> None:
    """Also when its handle is dropped: it cannot be resized, and its memory stays."""
    server = start()
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "held")
        store(namespace, 1)
        server.pause()
        room, array = bytearray(BLOCK_BYTES), np.zeros(BLOCK_BYTES, np.uint8)
        alive = weakref.ref(array)
        handle = namespace.submit_get_into(hashes(1), [room])
        namespace.submit_get_into(hashes(1), [array])
        del array
        gc.collect()
        with pytest.raises(BufferError):
            room.append(0)
        assert alive() is not None
        handle.cancel()
        with pytest.raises(kvstrata.CancelledError):
            handle.wait(5)
        room.append(0)
        assert alive() is not None
    assert alive() is None


def test_a_finished_call_holds_nothing(namespace: kvstrata.Namespace) -> None:
    """Whatever its end."""
    values = [bytearray(value(number)) for number in range(2)]
    namespace.put(hashes(2), values)
    rooms = [bytearray(BLOCK_BYTES) for _ in range(3)]
    namespace.get_into(hashes(3), rooms)
    namespace.submit_get_into(hashes(3), rooms).wait(5)
    namespace.submit_put(hashes(2), values).wait(5)
    for buffer in (*values, *rooms):
        buffer.append(0)


def test_a_tensor_lives_as_long_as_its_memory_is_lent(start: Start) -> None:
    """The object with the address must not die before the request."""
    server = start()
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "tensor")
        store(namespace, 1)
        server.pause()
        tensor = Tensor(BLOCK_BYTES)
        alive = weakref.ref(tensor)
        namespace.submit_get_into(hashes(1), [tensor])
        del tensor
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None
