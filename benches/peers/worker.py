"""One client in a process of its own, told by a pipe what to do next.

Every byte that comes is compared with what was put, outside of what is timed.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from clients import Client

BATCH = 64
PATTERN_BYTES = 8 << 20
STAMP_BYTES = 64
QUESTIONS = {1: 500, 1000: 100, 32768: 50}


@dataclass
class Phase:
    """What one client did in one phase; times in seconds."""

    began: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    bytes: int = 0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0


def names(size: int, index: int, tag: str, blocks: int) -> list[str]:
    """The keys of one client in one round."""
    return [f"{size}-{tag}-{index}-{block:06d}" for block in range(blocks)]


class Worker:
    """A client with the memory that all clients of the same index share, one after the other."""

    def __init__(self, client: Client, source: mmap.mmap, target: mmap.mmap) -> None:
        self.client = client
        self.source = np.frombuffer(source, dtype=np.uint8)
        self.target = np.frombuffer(target, dtype=np.uint8)

    def fill(self, keys: Sequence[str]) -> None:
        """Blocks of this round, different in every one: a pattern, moved, with a stamp."""
        pattern = np.random.default_rng(7).integers(0, 256, PATTERN_BYTES, dtype=np.uint8)
        size, step = self.client.size, min(PATTERN_BYTES, len(self.source))
        turn = hash(keys[0]) % step
        for at in range(0, len(self.source), step):
            self.source[at : at + step - turn] = pattern[turn:step]
            self.source[at + step - turn : at + step] = pattern[:turn]
        for block, key in enumerate(keys):
            stamp = np.frombuffer(key.encode().ljust(STAMP_BYTES, b"."), dtype=np.uint8)
            count = min(STAMP_BYTES, size)
            self.source[block * size : block * size + count] = stamp[:count]

    def prepare(self, kind: str, keys: Sequence[str]) -> None:
        """What comes before a phase."""
        self.client.prepare(keys)
        if kind == "put":
            self.fill(keys)
        else:
            self.target[:] = 0

    def work(self, kind: str, keys: Sequence[str]) -> Phase:
        """One phase."""
        phase = Phase(bytes=len(keys) * self.client.size)
        steps: list[Callable[[], None]]
        if kind == "batch":
            firsts = range(0, len(keys), BATCH)
            steps = [partial(self.client.get_batch, keys[at : at + BATCH], at) for at in firsts]
        else:
            verb = self.client.put if kind == "put" else self.client.get
            steps = [partial(verb, key, block) for block, key in enumerate(keys)]
        cpu, phase.began = time.process_time(), time.perf_counter()
        last = phase.began
        for step in steps:
            step()
            now = time.perf_counter()
            phase.latencies.append(now - last)
            last = now
        phase.ended, phase.cpu = last, time.process_time() - cpu
        if kind != "put":
            phase.wrong = self.wrong_blocks(len(keys))
        return phase

    def wrong_blocks(self, blocks: int) -> int:
        """How many blocks differ in any byte from what was put."""
        shape = (blocks, self.client.size)
        count = blocks * self.client.size
        put, got = self.source[:count].reshape(shape), self.target[:count].reshape(shape)
        return sum(not np.array_equal(put[block], got[block]) for block in range(blocks))

    def ask(self, keys: Sequence[str]) -> dict[str, list[float]]:
        """Seconds of questions for what is all there: of 1, 1,000 and 32,768 blocks."""
        self.client.prepare(keys)
        times: dict[str, list[float]] = {}
        for count, repeats in QUESTIONS.items():
            if count > len(keys):
                continue
            part = keys[:count]
            for verb in (self.client.exists, self.client.prefix):
                taken = []
                try:
                    if verb(part) is None:
                        continue
                except NotImplementedError:
                    continue
                for _ in range(repeats):
                    began = time.perf_counter()
                    found = verb(part)
                    taken.append(time.perf_counter() - began)
                    if found != count:
                        raise RuntimeError(f"{verb.__name__}: {found} of {count} are there")
                times[f"{verb.__name__} {count}"] = taken
        return times


def count_present(client: Client, keys: Sequence[str]) -> int:
    """How many are there, asked as exists is measured."""
    client.prepare(keys)
    return sum(client.exists(keys[at : at + 1000]) for at in range(0, len(keys), 1000))


def main(
    make: type[Client],
    address: dict[str, str],
    index: int,
    size: int,
    memories: tuple[mmap.mmap, mmap.mmap],
    pipe: Connection,
) -> None:
    """Answers what comes over the pipe until it closes; a failure is an answer, too."""
    if not os.environ.get("PEERS_VERBOSE"):  # Some clients log each of their steps.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        client = make(address, index, size, *memories)
        worker = Worker(client, *memories)
        pipe.send("ready")
        while True:
            answer: object = None
            match pipe.recv():
                case ("prepare", kind, keys):
                    worker.prepare(kind, keys)
                case ("work", kind, keys):
                    answer = worker.work(kind, keys)
                case ("remove", keys):
                    client.prepare(keys)
                    client.remove(keys)
                case ("put_all", keys):
                    client.put_all(keys)
                case ("present", keys):
                    answer = count_present(client, keys)
                case ("ask", keys):
                    answer = worker.ask(keys)
            pipe.send(answer)
    except EOFError:
        return
    except Exception as error:
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(repr(error)))
