"""How fast routers are told, and from where on they are told less often.

    .venv/bin/python benches/publish.py

A server, a client that puts small blocks and describes them, and libzmq that listens, all on this
machine. Asked: blocks per second to a listener that begins when all are there (withdrawn and
announced), the same to four at once, and while blocks come as fast as they are put, the time from
the answer to `describe` until the listener has the block. Not measured: what a router does with it.
The listener keeps a set of hashes, as cheaply as Python can.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))

from server import Server

import kvstrata

BLOCK_TOKENS = 16
PART_BYTES = 256
CHAIN = 1000
BLOCKS = 200_000


class Listener(threading.Thread):
    """Counts what it is told; when it has heard so many blocks, it notes the time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
        super().__init__(daemon=True)
        self.socket = context.socket(zmq.SUB)
        self.socket.rcvhwm = 0
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.socket.subscribe(b"")
        self.held: set[int] = set()
        self.heard_bytes = 0
        self.batches = 0
        self.stored_at: dict[int, float] = {}
        self.note = False

    def run(self) -> None:
        """Listens for ever."""
        while True:
            _, _, payload = self.socket.recv_multipart()
            now = time.perf_counter()
            self.heard_bytes += len(payload)
            self.batches += 1
            for event in msgpack.unpackb(payload)[1]:
                names = event["block_hashes"]
                if event["type"] == "BlockStored":
                    self.held.update(names)
                    if self.note:
                        self.stored_at[names[-1]] = now
                else:
                    self.held.difference_update(names)

    def wait(self, blocks: int) -> float:
        """When it has so many."""
        deadline = time.monotonic() + 120
        while len(self.held) < blocks:
            assert time.monotonic() < deadline, f"{len(self.held)} of {blocks}"
            time.sleep(0.0005)
        return time.perf_counter()


def chain(number: int) -> tuple[list[bytes], list[int]]:
    """The hashes and tokens of a chain."""
    hashes = [hashlib.sha256(f"{number} {block}".encode()).digest() for block in range(CHAIN)]
    return hashes, [(number * 7919 + token) % 150_000 for token in range(CHAIN * BLOCK_TOKENS)]


def put(namespace: kvstrata.Namespace, number: int) -> tuple[bytes, float]:
    """Puts and describes a chain; returns its last hash, and when it was answered."""
    hashes, tokens = chain(number)
    namespace.put(hashes, [digest * (PART_BYTES // 32) for digest in hashes])
    assert namespace.describe(hashes, tokens=tokens) == CHAIN
    return hashes[-1], time.perf_counter()


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as home:
        port = 18_555
        target = f"events.publish=dynamo=tcp://127.0.0.1:{port},model=m"
        server = Server(Path(home), target, "memory.limit=4GiB", "dram.capacity=512MiB")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            measure(server, context, port)
        finally:
            server.close()


def measure(server: Server, context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
    """All that is asked."""
    with kvstrata.Client(server.grpc) as client:
        namespace = client.open_namespace(
            model="m",
            engine="vllm",
            dtype="bf16",
            block_tokens=BLOCK_TOKENS,
            parts=[(0, 0, PART_BYTES)],
            hash_algorithm="sha256",
            keep_tokens=True,
        )
        first = Listener(context, port)
        first.start()
        first.note = True
        while server.metric("kvstrata_router_listeners") == 0:
            time.sleep(0.01)
        began = time.perf_counter()
        said = [put(namespace, number) for number in range(BLOCKS // CHAIN)]
        put_rate = BLOCKS / (said[-1][1] - began)
        told_rate = BLOCKS / (first.wait(BLOCKS) - began)
        late = [
            1000 * (first.stored_at[int.from_bytes(digest[-8:], "big")] - at)
            for digest, at in said
            if int.from_bytes(digest[-8:], "big") in first.stored_at
        ]
        first.note = False
        cuts = statistics.quantiles(late, n=100)
        row("put and described, one listener", put_rate, told_rate)
        print(
            f"| late by, ms p50 / p99 (of {len(late)} chains) | {cuts[49]:.1f} | {cuts[98]:.1f} |"
        )
        for count in (1, 4):
            began = time.perf_counter()
            bytes_before = first.heard_bytes
            more = [Listener(context, port) for _ in range(count)]
            for listener in more:
                listener.start()
            ended = max(listener.wait(BLOCKS) for listener in more)
            row(f"told everything, {count} new beside those before", 0, BLOCKS / (ended - began))
            each = (first.heard_bytes - bytes_before) / BLOCKS
            print(f"| bytes to each listener for a block, withdrawn and announced | | {each:.0f} |")
        resyncs = server.metric("kvstrata_router_resync_total")
        cut = server.metric("kvstrata_router_cut_listeners_total")
        print(f"| resyncs, listeners cut off | {resyncs:.0f} | {cut:.0f} |")


def row(name: str, put_rate: float, told_rate: float) -> None:
    """Prints a row."""
    print(f"| {name} | {put_rate or '':.6} | {told_rate:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
