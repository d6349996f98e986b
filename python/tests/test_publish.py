"""What routers are told, as libzmq hears it: one that connects, and one that is connected to."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zmq
from conftest import Server, Start, hashes

import kvstrata

BLOCK_TOKENS = 16
PART_BYTES = 4096
WAIT = 60.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def short(digest: bytes) -> int:
    """The number that routers know a block by."""
    return int.from_bytes(digest[-8:], "big")


class Router:
    """One who listens and believes what it is told, by the rules of both kinds of routers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.socket = context.socket(zmq.SUB)
        self.believed: Counter[tuple[str, str, int]] = Counter()
        """Topic, medium and hash, with how often it is there."""
        self.last: int | None = None
        self.batches = 0
        self.removed = 0

    def connect(self, port: int) -> Router:
        """As Dynamo does."""
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.subscribe(b"")
        return self

    def bind(self, port: int) -> Router:
        """As llm-d does."""
        deadline = time.monotonic() + 10
        while True:
            try:
                self.socket.bind(f"tcp://127.0.0.1:{port}")
                break
            except zmq.ZMQError:
                # The one before has not let go of it yet.
                assert time.monotonic() < deadline
                time.sleep(0.05)
        self.socket.subscribe(b"kv@")
        return self

    def hear(self, seconds: float = 0.02) -> None:
        """Takes what has come."""
        while self.socket.poll(int(seconds * 1000)):
            topic, number, payload = self.socket.recv_multipart()
            self.take(topic.decode(), int.from_bytes(number, "big"), payload)

    def take(self, topic: str, number: int, payload: bytes) -> None:
        """Takes a batch, as the one after the last."""
        self.batches += 1
        assert len(payload) < 1 << 20
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for event in events:
            if isinstance(event, list):
                names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size"]
                names += ["lora_id", "medium", "lora_name", "extra_keys"]
                if event[0] == "BlockRemoved":
                    names = ["type", "block_hashes", "medium"]
                event = dict(zip(names, event, strict=True))
            self.believe(topic, event)
        if not topic:
            assert self.last is None or number == self.last + 1
            self.last = number

    def believe(self, topic: str, event: dict[str, Any]) -> None:
        """Takes an event."""
        medium = event["medium"]
        if event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.removed += 1
                if self.believed[topic, medium, name] > 0:
                    self.believed[topic, medium, name] -= 1
            return
        assert event["type"] == "BlockStored"
        assert len(event["block_hashes"]) <= 256
        assert event["block_size"] == BLOCK_TOKENS
        assert len(event["token_ids"]) == BLOCK_TOKENS * len(event["block_hashes"])
        parent = event["parent_block_hash"]
        known = {name for (of, _, name), count in self.believed.items() if of == topic and count}
        assert parent is None or parent in known, "it would be dropped"
        for name in event["block_hashes"]:
            self.believed[topic, medium, name] += 1

    def index(self, topic: str = "") -> set[tuple[str, int]]:
        """What it believes: once each."""
        assert all(count <= 1 for count in self.believed.values())
        held = self.believed.items()
        return {(medium, name) for (of, medium, name), count in held if of == topic and count}

    def wait(self, expected: set[tuple[str, int]], topic: str = "") -> None:
        """Listens until this is what it believes."""
        self.wait_for(lambda: self.index(topic) == expected)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Listens until something is so."""
        deadline = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < deadline, f"{len(self.believed)} entries"
            self.hear()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Its sockets are closed in the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def open_kept(client: kvstrata.Client, model: str = "org/model", **more: Any) -> kvstrata.Namespace:
    """A namespace that keeps tokens."""
    return client.open_namespace(
        model=model,
        engine="vllm",
        dtype="bf16",
        block_tokens=BLOCK_TOKENS,
        parts=[(0, 0, PART_BYTES)],
        hash_algorithm="sha256",
        keep_tokens=True,
        **more,
    )


def store(namespace: kvstrata.Namespace, first: int, count: int) -> None:
    """Puts blocks that follow one another, and says what they are."""
    numbers = range(first, first + count)
    values = [number.to_bytes(4, "big") * (PART_BYTES // 4) for number in numbers]
    assert namespace.put(hashes(count, first), values).count("stored") == count
    describe(namespace, first, count)


def describe(namespace: kvstrata.Namespace, first: int, count: int) -> None:
    """Says what blocks are."""
    parent = hashes(1, first - 1)[0] if first else None
    tokens = list(range(first * BLOCK_TOKENS, (first + count) * BLOCK_TOKENS))
    described = namespace.describe(
        hashes(count, first), parent=parent, position=first, tokens=tokens
    )
    assert described == count


def on(medium: str, count: int, first: int = 0) -> set[tuple[str, int]]:
    """So many blocks on a tier."""
    return {(medium, short(digest)) for digest in hashes(count, first)}


def test_one_that_connects_is_told_what_its_worker_can_load(
    start: Start, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """From whenever it connects; and it can ask for what it has missed."""
    live, again = free_port(), free_port()
    target = f"dynamo=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{again},model=org/model"
    server = start(f"events.publish={target},worker=vllm-0")
    first = Router(context).connect(live)
    with (
        kvstrata.Client(server.grpc, instance="vllm-0") as client,
        kvstrata.Client(server.grpc, instance="vllm-1") as other,
    ):
        store(open_kept(other, weights="other"), 1000, 3)
        namespace = open_kept(client)
        store(namespace, 0, 700)
        first.wait(on("CPU_PINNED", 700))
        late = Router(context).connect(live)
        late.wait(on("CPU_PINNED", 700))
        assert namespace.remove(hashes(100, 600)) == 100
        store(namespace, 600, 20)
        for router in (first, late):
            router.wait(on("CPU_PINNED", 620))
            assert router.last is not None
        assert server.metric('kvstrata_shadow_entries{target="dynamo"}') == 620
        assert server.metric('kvstrata_router_listeners{target="dynamo"}') == 2
        check_replay(context, again, first)
    assert server.metric("kvstrata_seq_gap_requests_total") == 2


def check_replay(context: zmq.Context[zmq.Socket[bytes]], port: int, router: Router) -> None:
    """All batches again, and their end, to one who knows nothing and to one who knows most."""
    assert router.last is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    for asked, expected in ((0, router.batches), (router.last, 1)):
        dealer.send_multipart([b"", asked.to_bytes(8, "big")])
        again = Router(context)
        while True:
            assert dealer.poll(10_000)
            empty, topic, number, payload = dealer.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if not payload:
                assert number == b"\xff" * 8
                break
            if asked == 0:
                again.take("", int.from_bytes(number, "big"), payload)
            else:
                again.batches += 1
        assert again.batches == expected
        if asked == 0:
            assert again.index() == router.index()


def test_one_that_is_connected_to_is_told_of_each_worker(
    start: Start, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Of those that are named and those that are met; and everything again when it starts anew."""
    port = free_port()
    target = f"llm-d=tcp://127.0.0.1:{port},model=org/model"
    named = f"{target},worker=vllm-0@10.0.0.7:8000,encoding=array;{target},nvme=off"
    server = start(f"events.publish={named}")
    picker = Router(context).bind(port)
    with (
        kvstrata.Client(server.grpc, instance="vllm-0") as client,
        kvstrata.Client(server.grpc, instance="10.0.0.8:8000") as other,
    ):
        namespace = open_kept(client)
        open_kept(other)
        store(namespace, 0, 300)
        told = "kv@10.0.0.7:8000@org/model"
        met = "kv@10.0.0.8:8000@org/model"
        picker.wait(on("dram", 300), met)
        picker.wait(on("dram", 300), told)
        picker.socket.close(linger=0)
        store(namespace, 300, 50)
        picker = Router(context).bind(port)
        picker.wait(on("dram", 350), met)
        picker.wait(on("dram", 350), told)
        # What it had believed was withdrawn first.
        assert picker.removed >= 600
    assert server.metric('kvstrata_router_resync_total{target="llm-d",reason="subscribed"}') >= 4


def test_what_was_told_before_a_kill_is_withdrawn(
    start: Start, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Any
) -> None:
    """By a node that knows what it had said; a router that lives on counts right."""
    port = free_port()
    target = f"llm-d=tcp://127.0.0.1:{port},model=org/model,worker=vllm-0@pod"
    nvme = [f"nvme.path={tmp_path / 'data'}", "nvme.capacity=128MiB", "nvme.segment_bytes=16MiB"]
    server: Server = start(f"events.publish={target}", *nvme)
    topic = "kv@pod@org/model"
    picker = Router(context).bind(port)
    with kvstrata.Client(server.grpc, instance="vllm-0") as client:
        namespace = open_kept(client)
        store(namespace, 0, 200)
        picker.wait(on("dram", 200) | on("nvme", 200), topic)
    server.kill()
    server.start()
    with kvstrata.Client(server.grpc, instance="vllm-0") as client:
        namespace = open_kept(client)
        # Descriptions are kept with the blocks on nvme.
        picker.wait(on("nvme", 200), topic)
        assert picker.removed >= 400
        store(namespace, 200, 10)
        picker.wait(on("nvme", 210) | on("dram", 10, 200), topic)


def test_one_that_stands_still_is_cut_off_and_the_others_are_not(
    start: Start, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """It costs nobody anything but itself."""
    live = free_port()
    server = start(f"events.publish=dynamo=tcp://127.0.0.1:{live},model=org/model")
    with kvstrata.Client(server.grpc) as client, socket.socket() as still:
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        still.connect(("127.0.0.1", live))
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"
        still.sendall(b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48) + ready + b"\0\x01\x01")
        namespace = open_kept(client)
        moving = Router(context).connect(live)
        told = 0
        cut = 'kvstrata_router_cut_listeners_total{target="dynamo"}'
        deadline = time.monotonic() + WAIT
        while server.metric(cut) == 0:
            assert time.monotonic() < deadline
            if told < 12_000:
                store(namespace, told, 2_000)
                told += 2_000
            else:
                # Whoever comes has everything said again.
                passing = Router(context).connect(live)
                passing.hear(0.2)
                passing.socket.close(linger=0)
            moving.hear()
        moving.wait(on("CPU_PINNED", told))
        assert server.metric(cut) == 1
        assert server.metric('kvstrata_router_listeners{target="dynamo"}') == 1
