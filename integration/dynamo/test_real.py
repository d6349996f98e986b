"""Dynamo's own indexer, fed by our publisher, answers as our lookup does.

Run by `integration/dynamo/check.sh`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import BLOCK_TOKENS, Indexer, Start, free_port

import kvstrata

PART_BYTES = 4096
WORKER = 7


class Conversation:
    """A prompt, its blocks, and their hashes, as an engine chains them."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.hashes: list[bytes] = []
        parent = b""
        for first in range(0, len(tokens), BLOCK_TOKENS):
            block = ",".join(map(str, tokens[first : first + BLOCK_TOKENS]))
            parent = hashlib.sha256(parent + block.encode()).digest()
            self.hashes.append(parent)

    def store(self, namespace: kvstrata.Namespace) -> None:
        """Puts its blocks, and says what they are: as fast as a small memory takes them."""
        for first in range(0, len(self.hashes), 100):
            hashes = self.hashes[first : first + 100]
            values = [digest * (PART_BYTES // len(digest)) for digest in hashes]
            deadline = time.monotonic() + 60
            while True:
                outcome = namespace.put(hashes, values)
                if outcome.count("stored") + outcome.count("duplicate") == len(hashes):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.02)
            parent = self.hashes[first - 1] if first else None
            tokens = self.tokens[first * BLOCK_TOKENS : (first + len(hashes)) * BLOCK_TOKENS]
            described = namespace.describe(hashes, parent=parent, position=first, tokens=tokens)
            assert described == len(hashes)


def conversations(seed: int) -> list[Conversation]:
    """Some that begin alike."""

    def tokens(name: str, blocks: int) -> list[int]:
        stream = hashlib.shake_128(f"{seed} {name}".encode()).digest(blocks * BLOCK_TOKENS * 2)
        return [int.from_bytes(stream[at : at + 2], "big") for at in range(0, len(stream), 2)]

    system = tokens("system", 100)
    first = system + tokens("first", 400)
    return [
        Conversation(first),
        Conversation(system + tokens("second", 300)),
        Conversation(first[: 250 * BLOCK_TOKENS] + tokens("third", 500)),
        Conversation(tokens("fourth", 900)),
    ]


def open_namespace(client: kvstrata.Client, **more: Any) -> kvstrata.Namespace:
    """One that keeps tokens."""
    return client.open_namespace(
        model="org/model",
        engine="vllm",
        dtype="bf16",
        block_tokens=BLOCK_TOKENS,
        parts=[(0, 0, PART_BYTES)],
        hash_algorithm="sha256",
        keep_tokens=True,
        **more,
    )


def ours(namespace: kvstrata.Namespace, conversation: Conversation) -> tuple[int, int]:
    """What our lookup says: blocks in memory from the root on, and on any tier."""
    found = namespace.lookup(conversation.hashes)
    runs = found.runs
    return (runs[0].end if runs and runs[0].tier == "dram" else 0), found.prefix_blocks


def agree(
    namespace: kvstrata.Namespace, indexer: Indexer, all_of_them: list[Conversation], least: int
) -> None:
    """Waits until both say the same of each, and both find something."""
    deadline = time.monotonic() + 60
    while True:
        expected = [ours(namespace, each) for each in all_of_them]
        found = [indexer.matched(WORKER, each.tokens) for each in all_of_them]
        if found == expected and sum(blocks for _, blocks in found) >= least:
            return
        assert time.monotonic() < deadline, f"{found} is not {expected}"
        time.sleep(0.1)


def test_the_indexer_answers_as_we_do(
    start: Start, indexers: Callable[[], Indexer], tmp_path: Path
) -> None:
    """While blocks come, are evicted, removed; after a kill; and one that comes late."""
    live, replay = free_port(), free_port()
    target = f"dynamo=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay},model=org/model"
    server = start(
        f"events.publish={target},worker=vllm-0",
        "dram.capacity=8MiB",
        f"nvme.path={tmp_path / 'data'}",
        "nvme.capacity=128MiB",
        "nvme.segment_bytes=16MiB",
    )
    indexer = indexers()
    indexer.register(WORKER, live, replay)
    all_of_them = conversations(1)
    with kvstrata.Client(server.grpc, instance="vllm-0") as client:
        namespace = open_namespace(client)
        all_of_them[0].store(namespace)
        agree(namespace, indexer, all_of_them, 500)
        for conversation in all_of_them[1:]:
            conversation.store(namespace)
        agree(namespace, indexer, all_of_them, 2000)
        # More than fits into memory: the oldest go on from flash.
        for seed in range(2, 4):
            more = conversations(seed)
            for conversation in more:
                conversation.store(namespace)
            all_of_them += more
        agree(namespace, indexer, all_of_them, 2500)
        assert any(blocks > memory for memory, blocks in map_ours(namespace, all_of_them))
        gap = all_of_them[0].hashes[300:310]
        assert namespace.remove(gap) == 10
        agree(namespace, indexer, all_of_them, 1500)
        assert indexer.matched(WORKER, all_of_them[0].tokens)[1] == 300
        late = indexers()
        late.register(WORKER, live, replay)
        agree(namespace, late, all_of_them, 1500)
        agree(namespace, indexer, all_of_them, 1500)
    server.kill()
    server.start()
    with kvstrata.Client(server.grpc, instance="vllm-0") as client:
        namespace = open_namespace(client)
        agree(namespace, indexer, all_of_them, 1500)
        agree(namespace, late, all_of_them, 1500)
        all_of_them[0].store(namespace)
        agree(namespace, indexer, all_of_them, 1500)


def map_ours(
    namespace: kvstrata.Namespace, all_of_them: list[Conversation]
) -> list[tuple[int, int]]:
    """What our lookup says of each."""
    return [ours(namespace, each) for each in all_of_them]


def test_salts_and_workers_are_told_apart(start: Start, indexers: Callable[[], Indexer]) -> None:
    """Only whom a worker can load from is credited to it, and only for the salt."""
    ports = [(free_port(), free_port()) for _ in range(2)]
    targets = [
        f"dynamo=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay},model=org/model,"
        f"worker=vllm-{number}"
        for number, (live, replay) in enumerate(ports)
    ]
    server = start("events.publish=" + ";".join(targets))
    indexer = indexers()
    for number, (live, replay) in enumerate(ports):
        indexer.register(WORKER + number, live, replay)
    salted = conversations(5)[0]
    with (
        kvstrata.Client(server.grpc, instance="vllm-0") as client,
        kvstrata.Client(server.grpc, instance="vllm-1") as other,
    ):
        namespace = open_namespace(client, cache_salt=b"tenant-a")
        open_namespace(other)
        salted.store(namespace)
        deadline = time.monotonic() + 60
        while indexer.matched(WORKER, salted.tokens, cache_salt="tenant-a") != (500, 500):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert indexer.matched(WORKER, salted.tokens) == (0, 0)
        assert indexer.matched(WORKER + 1, salted.tokens, cache_salt="tenant-a") == (0, 0)
