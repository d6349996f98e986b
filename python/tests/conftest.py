"""A real server for each test that asks for one, and small helpers.

`KVSTRATA_BINARY` names the server's program; else it is the one that `cargo build` leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstrata

REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
BINARY = Path(os.environ.get("KVSTRATA_BINARY", TARGET / "debug" / "kvstrata"))
BLOCK_BYTES = 256 << 10
"""Of the blocks of most tests."""


def freeze(process: int) -> None:
    """Stops a process, and returns when it stands still."""
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").iterdir())
    while any((at / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for at in threads):
        time.sleep(0.001)


class Server:
    """A server process with dram only, killed at the end."""

    def __init__(self, home: Path, *settings: str) -> None:
        self.home = home
        self.settings = settings
        self.grpc = "127.0.0.1:0"
        self.bulk = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it; again on the same ports as before."""
        listen = ["--grpc-listen", self.grpc, "--http-listen", "127.0.0.1:0"]
        settings = [f"server.bulk_listen={self.bulk}", "dram.capacity=64MiB", *self.settings]
        flags = [flag for setting in settings for flag in ("--set", setting)]
        self.process = subprocess.Popen(
            [BINARY, "serve", "--print-addresses", *listen, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.home / "server.log").open("ab"),
            env={
                "HOME": str(self.home),
                "XDG_CONFIG_HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
            },
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server did not start: {(self.home / 'server.log').read_text()}"
        addresses = json.loads(line)
        self.grpc = addresses["grpc"]
        self.http = addresses["http"]
        self.bulk = addresses.get("bulk") or self.bulk
        self.resp = addresses.get("resp")

    def metric(self, series: str) -> float:
        """The value of a series in `/metrics`, given as it is printed there."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{series} ")]
        return float(value)

    def resident_kib(self) -> int:
        """Its resident memory that is its own, without dram."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = [line for line in status if line.startswith("RssAnon:")]
        return int(line.split()[1])

    def kill(self) -> None:
        """Ends it at once, whatever it is doing."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Stops it: it keeps its connections and answers nothing."""
        freeze(self.process.pid)

    def close(self) -> None:
        """Ends it if it still runs."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


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
