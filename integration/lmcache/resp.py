"""A real LMCache against the RESP listener: its connector in the engine's process, and its own.

Run by resp.sh, with the Python that has LMCache (0.5.6 was tried). Starts a node, stores chunks and
loads them again by both, byte for byte, deletes one half of a chunk, and kills the node in between.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

CHUNKS = 24
CHUNK_TOKENS = 256
SHAPE = (8, 2, CHUNK_TOKENS, 4, 64)
"""Layers, keys and values, tokens, heads, and the width of one."""


class Node:
    """A kvstrata server with an nvme tier."""

    def __init__(self, binary: str, home: Path) -> None:
        self.binary, self.home = binary, home
        self.resp = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Starts it, again on the same port as before."""
        settings = {
            "server.resp_listen": self.resp,
            "server.bulk_listen": "none",
            "memory.limit": "1GiB",
            "nvme.path": str(self.home),
            "nvme.capacity": "512MiB",
        }
        flags = [flag for pair in settings.items() for flag in ("--set", "=".join(pair))]
        listen = ["--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [self.binary, "serve", "--print-addresses", *listen, *flags],
            stdout=subprocess.PIPE,
            stderr=(self.home / "log").open("ab"),
            env={**os.environ, "XDG_CONFIG_HOME": str(self.home)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.home / "log").read_text()
        addresses = json.loads(line)
        self.resp, self.http = addresses["resp"], addresses["http"]

    def metric(self, series: str) -> float:
        """The value of a series."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{series} ")]
        return float(value)

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


def say(what: str) -> None:
    """One line of the report."""
    print(f"lmcache resp: {what}", flush=True)


class Engine:
    """LMCache's connector as an engine's process has it, on a loop of its own."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=True, max_local_cpu_size=0.5, remote_url=url
        )
        metadata = LMCacheMetadata(
            model_name="org/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=SHAPE,
        )
        self.memory = LocalCPUBackend(config, metadata=metadata)
        self.connector: Any = CreateConnector(url, self.loop, self.memory, config, metadata)

    def run(self, work: Any) -> Any:
        """What comes of it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=120)

    @staticmethod
    def key(number: int) -> CacheEngineKey:
        """The key of a chunk."""
        return CacheEngineKey("org/model", 1, 0, number * 7919 + 1, torch.bfloat16)

    @staticmethod
    def value(number: int) -> torch.Tensor:
        """The bytes of a chunk, which differ from those of every other one."""
        made = torch.Generator().manual_seed(number)
        length = 2 * SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3] * SHAPE[4]
        return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=made)

    def store(self, number: int) -> None:
        """Stores a chunk."""
        from lmcache.v1.memory_management import MemoryFormat

        layers, both, tokens, heads, width = SHAPE
        shape = torch.Size([both, layers, tokens, heads * width])
        place = self.memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        assert place is not None
        place.tensor.view(torch.uint8).view(-1)[:] = self.value(number)
        self.run(self.connector.put(self.key(number), place))

    def load(self, number: int) -> bool:
        """Loads a chunk; what comes is what was stored."""
        found = self.run(self.connector.get(self.key(number)))
        if found is None:
            return False
        assert torch.equal(found.tensor.view(torch.uint8).view(-1), self.value(number)), number
        found.ref_count_down()
        return True

    def exists(self, number: int) -> bool:
        """Whether it is there."""
        return bool(self.run(self.connector.exists(self.key(number))))


def in_process(node: Node) -> None:
    """The connector of `redis://`."""
    engine = Engine(f"redis://{node.resp}")
    assert not engine.exists(0) and not engine.load(0)
    for number in range(CHUNKS):
        engine.store(number)
    assert all(engine.exists(number) and engine.load(number) for number in range(CHUNKS))
    say(f"in process: {CHUNKS} chunks of {len(engine.value(0)) >> 10} KiB came back")
    import redis

    host, port = node.resp.rsplit(":", 1)
    with redis.Redis(host=host, port=int(port)) as plain:
        assert plain.delete(engine.key(0).to_string() + "kv_bytes") == 1
    assert not engine.exists(0) and not engine.load(0)
    engine.store(0)
    assert engine.load(0)
    say("in process: a chunk without one of its values is none, and can be stored again")
    deadline = time.monotonic() + 60
    while node.metric("kvstrata_nvme_blocks") < 2 * CHUNKS:
        assert time.monotonic() < deadline, "not copied to nvme"
        time.sleep(0.1)
    node.kill()
    node.start()
    engine = Engine(f"redis://{node.resp}")
    found = sum(engine.load(number) for number in range(CHUNKS))
    assert found == CHUNKS, f"{found} of {CHUNKS} after a kill"
    say("in process: all chunks came back from nvme after kill -9")


def native(node: Node, python: Path) -> None:
    """The adapter of `"type": "resp"`, by LMCache's own measure, which verifies what it loads."""
    host, port = node.resp.rsplit(":", 1)
    adapter = json.dumps({"type": "resp", "host": host, "port": int(port)})
    arguments = ["--num-keys", "32", "--in-flight", "2", "--rounds", "3", "--data-size-kb", "1024"]
    hits = ["--lookup-max-hit-rate", "0.5", "--no-skip-verify", "--format", "json"]
    command = [str(python.parent / "lmcache"), "bench", "l2", "--l2-adapter", adapter]
    done = subprocess.run(
        [*command, *arguments, *hits], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout[done.stdout.index("{") :]
    say("native: " + " ".join(said.split()))
    assert node.metric('kvstrata_resp_commands_total{command="set"}') > 0


def main() -> None:
    """See the module."""
    binary = sys.argv[1]
    with tempfile.TemporaryDirectory() as home:
        node = Node(binary, Path(home))
        try:
            in_process(node)
            native(node, Path(sys.executable))
            for reason in ("room", "length", "key", "option", "torn"):
                series = f'kvstrata_resp_dropped_values_total{{reason="{reason}"}}'
                assert node.metric(series) == 0, reason
            assert node.metric("kvstrata_resp_protocol_errors_total") == 0
        finally:
            node.kill()
    say("passed")
    # Threads of the engine's side have no end of their own.
    os._exit(0)


if __name__ == "__main__":
    main()
