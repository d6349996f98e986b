"""Servers as the tests of the Python package start them, and a real indexer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from starting import Start, start

__all__ = ["BLOCK_TOKENS", "Indexer", "Start", "free_port", "start"]

PYTHON = Path(os.environ["DYNAMO_ENV"]) / "bin" / "python"
START = "import sys, dynamo.llm; dynamo.llm.run_kv_indexer(sys.argv[1:])"
BLOCK_TOKENS = 16


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Indexer:
    """Dynamo's standalone indexer."""

    def __init__(self, home: Path) -> None:
        self.port = free_port()
        self.log = home / f"indexer-{self.port}.log"
        arguments = ["--port", str(self.port), "--block-size", str(BLOCK_TOKENS), "--threads", "1"]
        self.process = subprocess.Popen(
            [PYTHON, "-c", START, *arguments],
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("/health")
                return
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def call(self, path: str, body: Any = None) -> Any:
        """What it answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            said = answer.read().decode()
        return json.loads(said) if said else None

    def register(self, worker: int, live: int, replay: int) -> None:
        """Has it listen to a worker's blocks, beside the engine's own events of rank 0."""
        self.call(
            "/register",
            {
                "instance_id": worker,
                "dp_rank": 1000,
                "model_name": "org/model",
                "block_size": BLOCK_TOKENS,
                "endpoint": f"tcp://127.0.0.1:{live}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            },
        )

    def matched(self, worker: int, tokens: list[int], **more: str) -> tuple[int, int]:
        """Blocks of a prompt that a worker has in memory from the root on, and on any tier."""
        answer = self.call("/query", {"token_ids": tokens, "model_name": "org/model", **more})
        found = answer["instances"].get(str(worker))
        if found is None:
            return 0, 0
        assert found["gpu"] == 0 and set(found["dp"]) <= {"0"}, found
        return found["cpu"] // BLOCK_TOKENS, found["disk"] // BLOCK_TOKENS

    def close(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def indexers(tmp_path: Path) -> Iterator[Callable[[], Indexer]]:
    """Starts indexers."""
    running: list[Indexer] = []

    def starter() -> Indexer:
        running.append(Indexer(tmp_path))
        return running[-1]

    yield starter
    for indexer in running:
        indexer.close()
