"""Our L2 connector under LMCache's own adapter, and under a whole LMCache server.

Run by `integration/lmcache/check.sh`.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Server, Start
from fake_lmcache import key as double_key
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import _object_key_to_string
from lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter import NativePluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kvstrata.lmcache.keys import space_of

CHUNK = 256 << 10
DEADLINE = 60.0
"""Seconds after which a check gives up."""
SHAPE = "(2,512,16,2,128):float16:8"
"""KV of the bench: 16 chunks of 256 tokens a request, each 2 MiB."""
Make = Callable[..., "Adapter"]


def plugin(server: Server, **params: Any) -> dict[str, Any]:
    """What a person pastes."""
    return {
        "type": "native_plugin",
        "module_path": "kvstrata.lmcache",
        "class_name": "KvstrataConnector",
        "adapter_params": {"endpoint": server.grpc, "timeout": 10.0} | params,
    }


def keys(model: str, *chunks: int, **said: Any) -> list[ObjectKey]:
    """LMCache's own keys."""
    return [
        ObjectKey(
            chunk_hash=chunk.to_bytes(32, "big"), model_name=model, kv_rank=0x01000100, **said
        )
        for chunk in chunks
    ]


def memory(count: int, seed: int | None = None, length: int = CHUNK) -> list[Any]:
    """LMCache's own memory objects, with bytes that only this one has, or none."""
    objects = []
    for number in range(count):
        data = torch.zeros(length, dtype=torch.uint8)
        if seed is not None:
            chance = torch.Generator().manual_seed(seed + number)
            data = torch.randint(0, 256, (length,), generator=chance, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            shape=torch.Size([length]),
            dtype=torch.uint8,
            address=0,
            phy_size=length,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        objects.append(TensorMemoryObj(raw_data=data, metadata=metadata, parent_allocator=None))
    return objects


class Adapter:
    """LMCache's own adapter around our connector, asked and waited for."""

    def __init__(self, server: Server, **params: Any) -> None:
        config = NativePluginL2AdapterConfig.from_dict(plugin(server, **params))
        self.real = create_l2_adapter(config)

    def store(self, names: list[ObjectKey], objects: list[Any]) -> bool:
        """Whether all were stored."""
        task = self.real.submit_store_task(names, objects)
        done: dict[int, Any] = {}

        def ended() -> Any:
            done.update(self.real.pop_completed_store_tasks())
            return done.get(task)

        return bool(self._wait(self.real.get_store_event_fd(), ended).is_successful())

    def lookup(self, names: list[ObjectKey]) -> list[int]:
        """Positions of those that are there."""
        task = self.real.submit_lookup_and_lock_task(names, {})
        ask = self.real.query_lookup_and_lock_result
        bits = self._wait(self.real.get_lookup_and_lock_event_fd(), lambda: ask(task))
        self.real.submit_unlock(names)
        return sorted(bits.get_indices_list())

    def load(self, names: list[ObjectKey], objects: list[Any]) -> list[int]:
        """Positions of those that were loaded."""
        task = self.real.submit_load_task(names, objects)
        ask = self.real.query_load_result
        bits = self._wait(self.real.get_load_event_fd(), lambda: ask(task))
        return sorted(bits.get_indices_list())

    def _wait(self, descriptor: int, ask: Callable[[], Any]) -> Any:
        end = time.monotonic() + DEADLINE
        while True:
            answer = ask()
            if answer is not None:
                return answer
            assert time.monotonic() < end, "it does not end"
            select.select([descriptor], [], [], 0.05)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes adapters."""
    adapters: list[Adapter] = []

    def maker(server: Server, **params: Any) -> Adapter:
        adapters.append(Adapter(server, **params))
        return adapters[-1]

    yield maker
    for adapter in adapters:
        adapter.real.close()


def test_the_double_has_lmcaches_keys() -> None:
    for salt in ("", "user-1"):
        real = ObjectKey(
            chunk_hash=bytes.fromhex(double_key(7).split("@")[3]),
            model_name="org/model",
            kv_rank=ObjectKey.ComputeKVRank(8, 5, 4, 1),
            object_group_id=31,
            cache_salt=salt,
        )
        text = _object_key_to_string(real)
        assert text == double_key(7, model="org/model", rank=0x08050401, group=31, salt=salt)
        assert str(space_of(text)).startswith("org/model@08050401@1f")


def test_chunks_come_back_through_lmcaches_adapter(shared_server: Server, make: Make) -> None:
    writer = make(shared_server)
    names, stored = keys("real/chunks", *range(20)), memory(20, seed=1)
    assert writer.lookup(names) == []
    assert writer.store(names, stored)
    reader = make(shared_server)
    assert reader.lookup(names + keys("real/chunks", 99)) == list(range(20))
    loaded = memory(20)
    assert reader.load(names, loaded) == list(range(20))
    assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(stored, loaded, strict=True))
    writer.real.delete(names[4:6])
    assert reader.lookup(names) == [at for at in range(20) if at not in (4, 5)]
    assert writer.real.get_usage().total_bytes_used == 18 * CHUNK


def test_salts_and_labels_are_apart(shared_server: Server, make: Make) -> None:
    adapter, other = make(shared_server), make(shared_server, label="fp8")
    assert adapter.store(keys("real/salt", 1, cache_salt="a"), memory(1, seed=2))
    assert adapter.lookup(keys("real/salt", 1, cache_salt="a")) == [0]
    assert adapter.lookup(keys("real/salt", 1, cache_salt="b")) == []
    assert adapter.lookup(keys("real/salt", 1)) == []
    assert other.lookup(keys("real/salt", 1, cache_salt="a")) == []
    assert adapter.load(keys("real/salt", 1, cache_salt="a"), memory(1, length=CHUNK // 2)) == []


def test_a_killed_and_a_hung_server_are_misses_and_hits_come_back(start: Start, make: Make) -> None:
    server = start()
    adapter = make(server, timeout=0.5, load_timeout=2.0)
    names, stored = keys("real/kill", *range(5)), memory(5, seed=3)
    assert adapter.store(names, stored)
    for fault in ("hang", "kill"):
        server.pause() if fault == "hang" else server.kill()
        begun = time.monotonic()
        assert adapter.load(names, memory(5)) == []
        assert adapter.lookup(names) == []
        assert not adapter.store(names, stored)
        assert time.monotonic() - begun < 8.0
        if fault == "hang":
            server.process.send_signal(signal.SIGCONT)
        else:
            server.start()
        until(lambda: adapter.store(names, stored))
        assert adapter.load(names, memory(5)) == list(range(5))


def test_lmcaches_bench_verifies_what_it_stored(shared_server: Server) -> None:
    answer = run_lmcache(
        *("bench", "l2", "--l2-adapter", json.dumps(plugin(shared_server)), "--num-keys", "16"),
        *("--in-flight", "2", "--data-size-kb", "1024", "--rounds", "2", "--no-skip-verify"),
        *("--lookup-max-hit-rate", "0.5"),
    )
    succeeded = [int(each) for each in re.findall(r"Total success: +(\d+)", answer)]
    assert succeeded[0] == succeeded[2] == 64, answer
    assert succeeded[1] > 0, answer
    assert "MISMATCH" not in answer


def test_a_killed_lmcache_server_finds_its_chunks_again(start: Start, tmp_path: Path) -> None:
    server = start("dram.capacity=1GiB")
    hits = []
    for turn in range(2):
        log = tmp_path / f"lmcache-{turn}.log"
        ports = [free_port() for _ in range(3)]
        with lmcache_server(server, ports, log):
            # The bench asks for chunks, stores those that are missing, and asks again.
            run_lmcache(
                *("bench", "server", "--rpc-url", f"tcp://127.0.0.1:{ports[0]}"),
                *("--url", f"http://127.0.0.1:{ports[1]}", "--mode", "cpu"),
                *("--transfer-mode", "lmcache_driven", "--kvcache-shape-spec", SHAPE),
                *("--num-blocks", "512", "--num-tokens", "4096", "--end", "3", "--interval", "1"),
            )
        found = re.findall(r"retained keys \((\d+) L1, (\d+) L2\).*req-(\d+)-cold", log.read_text())
        hits.append(found)
    # Whole from us, after a kill -9 of the server that had them in its memory.
    assert hits == [[], [("0", "16", "0"), ("0", "16", "1"), ("0", "16", "2")]]


@contextmanager
def lmcache_server(server: Server, ports: list[int], log: Path) -> Iterator[None]:
    """A `lmcache server` with our adapter, killed at the end."""
    rpc, http, prometheus = map(str, ports)
    process = subprocess.Popen(
        [
            *LMCACHE,
            *("server", "--host", "127.0.0.1", "--port", rpc, "--prometheus-port", prometheus),
            *("--http-host", "127.0.0.1", "--http-port", http),
            *("--l1-size-gb", "1", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(plugin(server))),
        ],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
    )
    try:
        until(lambda: is_open(ports[1]))
        yield
    finally:
        process.kill()
        process.wait()


LMCACHE = [str(Path(sys.executable).with_name("lmcache"))]
ENVIRONMENT = os.environ | {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


def run_lmcache(*arguments: str) -> str:
    """What a command of LMCache says."""
    command = [*LMCACHE, *arguments]
    ran = subprocess.run(command, env=ENVIRONMENT, timeout=300, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Callable[[], object]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.05)
