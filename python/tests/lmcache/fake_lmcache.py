"""What LMCache's `NativeConnectorL2Adapter` does with a connector, without LMCache or torch.

Keys and the handling of completions are those of LMCache 0.5.6: `integration/lmcache/check.py` runs
the same connector under LMCache's own adapter.
"""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Sequence
from typing import Any

from kvstrata.lmcache import KvstrataConnector
from kvstrata.lmcache.connector import Completion

CHUNK_BYTES = 64 << 10
DEADLINE = 20.0
"""Seconds after which a test gives up."""


def key(
    chunk: int, *, model: str = "m", rank: int = 0x01000100, group: int = 0, salt: str = ""
) -> str:
    """The key of a chunk."""
    digest = hashlib.sha256(str(chunk).encode()).hexdigest()
    return f"{model}@{rank:08x}@{group:x}@{digest}" + (f"@{salt}" if salt else "")


def value(of: str, length: int = CHUNK_BYTES) -> bytes:
    """Bytes that only this key has."""
    return hashlib.shake_128(of.encode()).digest(length)


class Adapter:
    """Submits batches and waits for their ends. Each batch must end once, with all its results."""

    def __init__(self, endpoint: str, **params: Any) -> None:
        # A busy machine is no fault of the server's.
        settings = {"endpoint": endpoint, "timeout": 10.0}
        self.connector = KvstrataConnector(**(settings | params))
        self.ended: dict[int, Completion] = {}
        self.submitted: dict[int, int] = {}
        self.poller = select.poll()
        self.poller.register(self.connector.event_fd(), select.POLLIN)

    def wait(self, number: int, keys: int) -> Completion:
        """The end of a batch."""
        assert number not in self.submitted, "a number was given twice"
        self.submitted[number] = keys
        end = time.monotonic() + DEADLINE
        while number not in self.ended:
            assert time.monotonic() < end, "it does not end"
            if not self.poller.poll(500):
                continue
            for completion in self.connector.drain_completions():
                assert completion[0] not in self.ended, "it ended twice"
                self.ended[completion[0]] = completion
        completion = self.ended[number]
        assert completion[3] is not None
        assert len(completion[3]) == keys
        return completion

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which values there are."""
        return self.wait(self.connector.submit_batch_exists(keys), len(keys))[3] or []

    def store(self, keys: Sequence[str], length: int = CHUNK_BYTES) -> bool:
        """Stores the values of keys; the memory is used again at once when that has ended."""
        values = [bytearray(value(each, length)) for each in keys]
        number = self.connector.submit_batch_set(keys, [memoryview(each) for each in values])
        stored = self.wait(number, len(keys))[1]
        for each in values:
            each[:] = bytes(length)
        return stored

    def load(self, keys: Sequence[str], length: int = CHUNK_BYTES) -> list[bool]:
        """Loads values, and checks the bytes of each that came."""
        rooms = [bytearray(length) for _ in keys]
        number = self.connector.submit_batch_get(keys, [memoryview(each) for each in rooms])
        loaded = self.wait(number, len(keys))[3] or []
        for each, room, is_there in zip(keys, rooms, loaded, strict=True):
            assert not is_there or room == value(each, length), each
        return loaded

    def delete(self, keys: Sequence[str]) -> bool:
        """Removes values."""
        return self.wait(self.connector.submit_batch_delete(keys), len(keys))[1]
