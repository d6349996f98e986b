"""Events as engines publish them: by libzmq, with its own queues and connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq
from conftest import Server, Start, hashes, open_namespace, store

import kvstrata

BLOCK_TOKENS = 16


class Engine:
    """A publisher and a replay endpoint, on ports of its own, as vLLM has them."""

    def __init__(self, ports: tuple[int, int] = (0, 0), kept: int = 1000) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.ports = (bind(self.publisher, ports[0]), bind(self.router, ports[1]))
        self.number = 0
        self.kept = kept
        self.batches: dict[int, bytes] = {}
        self.stop = threading.Event()
        self.replaying = threading.Thread(target=self.replay)
        self.replaying.start()

    def replay(self) -> None:
        """Sends again what is kept, to whoever asks."""
        while not self.stop.is_set():
            if not self.router.poll(50):
                continue
            peer, empty, first = self.router.recv_multipart()
            for number in sorted(self.batches):
                if number >= int.from_bytes(first, "big"):
                    name = number.to_bytes(8, "big")
                    self.router.send_multipart([peer, empty, b"", name, self.batches[number]])
            self.router.send_multipart([peer, empty, b"", b"\xff" * 8, b""])

    def publish(self, *events: Any, drop: bool = False) -> None:
        """Publishes a batch, unless it is to be lost on the way."""
        payload = msgpack.packb([time.time(), list(events), 0])
        self.batches[self.number] = payload
        self.batches.pop(self.number - self.kept, None)
        if not drop:
            self.publisher.send_multipart([b"kv", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def close(self) -> None:
        """Is gone."""
        self.stop.set()
        self.replaying.join()
        self.publisher.close(linger=0)
        self.router.close(linger=0)
        self.context.term()

    def source(self, model: str) -> str:
        """The setting to listen to it."""
        publisher, router = self.ports
        here = "tcp://127.0.0.1"
        return f"events.subscribe={here}:{publisher},model={model},replay={here}:{router}"


def bind(socket: zmq.Socket[bytes], port: int) -> int:
    """Binds to a port, or to one that is free."""
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            break
        except zmq.ZMQError:
            # The one before has not let go of it yet.
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Those that are in it are closed."""
    running: list[Engine] = []
    yield running
    for engine in running:
        engine.close()


def stored(first: int, count: int, *, whole: bool) -> dict[str, Any]:
    """An event of blocks that follow one another."""

    def published(number: int) -> bytes | int:
        digest = hashes(1, number)[0]
        return digest if whole else int.from_bytes(digest[-8:], "big")

    return {
        "type": "BlockStored",
        "block_hashes": [published(number) for number in range(first, first + count)],
        "parent_block_hash": published(first - 1) if first else None,
        "token_ids": list(range(count * BLOCK_TOKENS)),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * count,
        "group_idx": 0,
    }


def wait(server: Server, series: str, value: float) -> None:
    """Waits until a series has a value."""
    deadline = time.monotonic() + 60
    while server.metric(series) < value:
        assert time.monotonic() < deadline, f"{series} is {server.metric(series)}, not {value}"
        time.sleep(0.02)
    assert server.metric(series) == value, series


def outcome(name: str) -> str:
    """The series of batches that became this."""
    return f'kvstrata_event_batches_total{{outcome="{name}"}}'


def subscribe(server: Server, engine: Engine) -> None:
    """Publishes until the server hears: libzmq drops what nobody has subscribed to yet."""
    deadline = time.monotonic() + 60
    while server.metric(outcome("taken")) == 0:
        assert time.monotonic() < deadline
        engine.publish()
        time.sleep(0.05)


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_are_described(start: Start, engines: list[Engine], whole: bool) -> None:
    """Whichever comes first, what is told or what is put."""
    engines.append(Engine())
    server = start(engines[0].source("events"))
    subscribe(server, engines[0])
    with kvstrata.Client(server.grpc) as client:
        namespace = open_namespace(client, "events")
        store(namespace, 20)
        engines[0].publish({"type": "AllBlocksCleared"}, stored(0, 10, whole=whole))
        described = "kvstrata_event_described_blocks_total"
        wait(server, described, 10)
        engines[0].publish(["BlockRemoved", [1]], stored(10, 20, whole=whole))
        wait(server, described, 20)
        store_more(namespace, 20, 10)
        wait(server, described, 30)


def store_more(namespace: kvstrata.Namespace, first: int, count: int) -> None:
    """Puts blocks behind others."""
    values = [bytes([number]) * (256 << 10) for number in range(first, first + count)]
    assert namespace.put(hashes(count, first), values).count("stored") == count


def test_gaps_are_asked_for_and_new_starts_noticed(start: Start, engines: list[Engine]) -> None:
    """Over libzmq's own replies; nothing of what is kept is lost."""
    engines.append(Engine())
    server = start(engines[0].source("events"))
    subscribe(server, engines[0])
    with kvstrata.Client(server.grpc) as client:
        store(open_namespace(client, "events"), 60)
        before = server.metric(outcome("replayed"))
        for first in range(0, 20, 2):
            engines[0].publish(stored(first, 2, whole=True), drop=first % 6 != 0)
        wait(server, "kvstrata_event_described_blocks_total", 20)
        assert server.metric(outcome("replayed")) == before + 6
        assert server.metric(outcome("lost")) == 0
        ports = engines[0].ports
        engines.pop().close()
        engines.append(Engine(ports))
        for first in range(20, 60, 2):
            engines[0].publish(stored(first, 2, whole=True), drop=True)
        wait(server, "kvstrata_event_sources", 1)
        deadline = time.monotonic() + 60
        while server.metric("kvstrata_event_described_blocks_total") < 60:
            assert time.monotonic() < deadline
            engines[0].publish()
            time.sleep(0.05)
        assert server.metric(outcome("lost")) == 0


def test_an_engine_that_is_faster_than_we_are_loses_nothing(
    start: Start, engines: list[Engine]
) -> None:
    """What its queues drop is asked for again, or counted as lost."""
    engines.append(Engine(kept=100_000))
    engines[0].publisher.close(linger=0)
    engines[0].publisher = engines[0].context.socket(zmq.PUB)
    engines[0].publisher.sndhwm = 10
    engines[0].ports = (bind(engines[0].publisher, 0), engines[0].ports[1])
    server = start(engines[0].source("events"))
    subscribe(server, engines[0])
    begun = engines[0].number
    filler = stored(0, 1000, whole=True)
    for _ in range(300):
        engines[0].publish(filler)
    deadline = time.monotonic() + 60
    seen = 0.0
    while seen < engines[0].number:
        assert time.monotonic() < deadline, f"{seen} of {engines[0].number}"
        engines[0].publish()
        time.sleep(0.05)
        seen = sum(server.metric(outcome(name)) for name in ("taken", "replayed", "lost"))
    assert server.metric(outcome("lost")) == 0, begun
    assert server.metric(outcome("broken")) == 0
