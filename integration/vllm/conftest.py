"""Real vLLM engines and real servers for the tests of this directory."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from engine import Engine
from server import Server

__all__ = ["Engine", "Server", "Start", "prompt"]

Start = Callable[..., Server]


def prompt(seed: int, tokens: int = 1025) -> list[int]:
    """So many tokens that no other seed has. Of the last one blocks are not reused."""
    draw = random.Random(seed)
    return [draw.randrange(1, 250) for _ in range(tokens)]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines write what they say."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def engine(logs: Path) -> Iterator[Engine]:
    """One process for all tests, since importing vLLM takes longer than most of them."""
    engine = Engine(logs / "engine.log")
    yield engine
    engine.kill()


@pytest.fixture(scope="module", params=["tier", "connector"], autouse=True)
def adapter(request: pytest.FixtureRequest, engine: Engine) -> str:
    """All tests are for both adapters."""
    engine.adapter = str(request.param)
    return engine.adapter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, each in a directory of its own."""
    servers: list[Server] = []

    def starter(*settings: str) -> Server:
        home = tmp_path / f"server-{len(servers)}"
        home.mkdir()
        servers.append(Server(home, "dram.capacity=512MiB", *settings))
        return servers[-1]

    yield starter
    for server in servers:
        server.close()
