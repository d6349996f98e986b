"""Engines that come back to their contexts, for tests that look at nodes under load: replays of
traces, one after another, by the program itself, which checks every byte that it gets.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from server import BINARY, Server

ENGINES = 6
"""So many that each of three nodes is the home of some."""
# Blocks of so many sizes, one after another, of which what was put before is evicted.
BLOCKS = ("8KiB", "12KiB", "16KiB", "8KiB", "20KiB", "12KiB")


@dataclass
class Traffic:
    """What was replayed so far, and what was wrong with it."""

    over: threading.Event = field(default_factory=threading.Event)
    rounds: int = 0
    problems: list[str] = field(default_factory=list)

    def run(self, home: Path, endpoints: str, traces: Sequence[Path], requests: int) -> None:
        """Goes on until it is over. Puts wait for the disk: else they come faster than any takes
        them."""
        while not self.over.is_set():
            command = [str(BINARY), "replay", str(traces[self.rounds % len(traces)]), "--durable"]
            command += ["--endpoint", endpoints, "--clients", str(ENGINES)]
            command += ["--block-bytes", BLOCKS[self.rounds % len(BLOCKS)]]
            done = subprocess.run(
                [*command, "--requests", str(requests)],
                capture_output=True,
                text=True,
                env=os.environ | {"HOME": str(home)},
                check=False,
            )
            words = [line.split() for line in done.stdout.splitlines()]
            if ["wrong", "bytes", "0"] not in words:
                self.problems.append(done.stdout + done.stderr)
            self.rounds += 1


@contextmanager
def traffic(
    home: Path, nodes: Sequence[Server], traces: Sequence[Path], requests: int = 100
) -> Iterator[Traffic]:
    """Loads the nodes for as long as one is in it."""
    made = Traffic()
    endpoints = ",".join(node.grpc for node in nodes)
    thread = threading.Thread(target=made.run, args=(home, endpoints, traces, requests))
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        thread.join()
