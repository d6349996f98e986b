"""Servers for tests: as many as one starts, all ended with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server import Server

__all__ = ["Start", "start"]

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers with other settings."""
    servers: list[Server] = []

    def starter(*settings: str) -> Server:
        servers.append(Server(tmp_path, *settings))
        return servers[-1]

    yield starter
    for server in servers:
        server.close()
