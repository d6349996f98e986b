"""A real server for each test that asks for one, and small helpers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from server import Server
from starting import Start, start

import kvstrata

__all__ = ["BLOCK_BYTES", "Server", "Start", "hashes", "open_namespace", "start", "store", "value"]

BLOCK_BYTES = 256 << 10
"""Of the blocks of most tests."""


@pytest.fixture
def server(start: Start) -> Server:
    """A server of its own, which may be killed."""
    return start()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a file that leave it as it is."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture
def client(shared_server: Server) -> Iterator[kvstrata.Client]:
    """A client of the shared server."""
    with kvstrata.Client(shared_server.grpc) as client:
        yield client


@pytest.fixture
def namespace(client: kvstrata.Client, request: pytest.FixtureRequest) -> kvstrata.Namespace:
    """A namespace that no other test has."""
    return open_namespace(client, request.node.name)


def open_namespace(
    client: kvstrata.Client, model: str, parts: tuple[int, ...] = (BLOCK_BYTES,)
) -> kvstrata.Namespace:
    """A namespace of vLLM's kind with parts of these lengths."""
    return client.open_namespace(
        model=model,
        engine="vllm",
        dtype="bf16",
        block_tokens=16,
        parts=[(0, rank, length) for rank, length in enumerate(parts)],
        hash_algorithm="sha256",
    )


def hashes(count: int, first: int = 0) -> list[bytes]:
    """Hashes of so many blocks."""
    return [hashlib.sha256(str(number).encode()).digest() for number in range(first, first + count)]


def value(number: int, length: int = BLOCK_BYTES) -> bytes:
    """Bytes that differ from those of every other number."""
    return hashlib.shake_128(str(number).encode()).digest(length)


def store(namespace: kvstrata.Namespace, count: int) -> list[bytes]:
    """Puts so many blocks of one part; returns their values."""
    values = [value(number) for number in range(count)]
    assert namespace.put(hashes(count), values).count("stored") == count
    return values
