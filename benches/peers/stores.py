"""The servers: how each is started, what it runs as, and how it is stopped again.

Each keeps `CAPACITY` bytes of blocks in memory, nothing on disk, and listens on loopback alone.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

CAPACITY = 1 << 30
CLIENTS_MAX = 4
START_SECONDS = 30.0
STOP_SECONDS = 10.0
REPOSITORY = Path(__file__).resolve().parents[2]


class UnavailableError(Exception):
    """This store cannot run here; the text says why."""


@dataclass
class Store:
    """Processes that are running, and what a client has to know of them."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    address: dict[str, str] = field(default_factory=dict)
    # Files of shared memory that are the server's, if it does not map them whole itself.
    shared_pattern: str | None = None

    @property
    def process_ids(self) -> list[int]:
        """Whose processor time and memory count as the server's."""
        return [process.pid for process in self.processes]

    @property
    def shared_files(self) -> list[Path]:
        """What lies in /dev/shm for it."""
        return list(Path("/dev/shm").glob(self.shared_pattern)) if self.shared_pattern else []

    def memory_bytes(self) -> int:
        """Resident memory of all processes, with what lies in files of shared memory."""
        kinds = ["RssAnon", "RssFile"] + ([] if self.shared_files else ["RssShmem"])
        total = sum(path.stat().st_blocks * 512 for path in self.shared_files)
        for process in self.process_ids:
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                total += int(value.split()[0]) * 1024 if name in kinds else 0
        return total

    def stop(self) -> None:
        """Ends the processes, and removes what they leave behind."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in self.shared_files:  # After SIGTERM it stays behind.
            path.unlink()


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Where a program lies: beside this interpreter, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UnavailableError(f"there is no program `{name}`")
    return found


def run(store: Store, directory: Path, command: list[str], ready: int | Path) -> None:
    """Starts one process of a store and waits until it listens at a port or Unix socket."""
    log = directory / f"{Path(command[0]).name}-{len(os.listdir(directory))}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory)
    store.processes.append(process)
    deadline = time.monotonic() + START_SECONDS
    while not listens(ready):
        if process.poll() is not None or time.monotonic() > deadline:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            store.stop()
            raise UnavailableError(f"{Path(command[0]).name} does not start: {last}")
        time.sleep(0.05)


def listens(ready: int | Path) -> bool:
    """Whether somebody answers there."""
    family = socket.AF_INET if isinstance(ready, int) else socket.AF_UNIX
    with socket.socket(family) as probe:
        target = ("127.0.0.1", ready) if isinstance(ready, int) else str(ready)
        return probe.connect_ex(target) == 0


def kvstrata(directory: Path, *, unix: bool, shared: bool = False) -> Store:
    """One node, dram only; `unix` or TCP is its bulk port, and `shared` shows its memory, too."""
    binary = REPOSITORY / "target/release/kvstrata"
    if not binary.exists():
        raise UnavailableError("target/release/kvstrata is not built: run run.sh")
    grpc = free_port()
    settings = {
        "server.grpc_listen": f"127.0.0.1:{grpc}",
        "server.http_listen": "127.0.0.1:0",
        "server.bulk_listen": "none" if unix else "127.0.0.1:0",
        "memory.limit": f"{CAPACITY * 5 // 4}B",
        "dram.capacity": f"{CAPACITY}B",
    }
    if unix:
        settings["server.bulk_unix"] = str(directory / "bulk.sock")
    if shared:
        settings["server.shared_memory"] = "true"
    store = Store(address={"endpoint": f"127.0.0.1:{grpc}"})
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run(store, directory, [str(binary), "serve", *sets], grpc)
    return store


def redis(directory: Path) -> Store:
    """Without persistence; the least recently used key leaves first."""
    port = free_port()
    store = Store(address={"port": str(port)})
    options = f"--bind 127.0.0.1 --port {port} --appendonly no --maxmemory {CAPACITY}"
    policy = ["--save", "", "--maxmemory-policy", "allkeys-lru"]
    run(store, directory, [program("redis-server"), *options.split(), *policy], port)
    return store


def memcached(directory: Path) -> Store:
    """Four threads, values of up to 32 MiB (by default it refuses what is over 1 MB)."""
    port = free_port()
    store = Store(address={"port": str(port)})
    options = f"-u root -l 127.0.0.1 -p {port} -m {CAPACITY >> 20} -I 32m -t 4"
    run(store, directory, [program("memcached"), *options.split()], port)
    return store


def mooncake(directory: Path) -> Store:
    """A master and a client process that lends it memory, over TCP."""
    master, port = free_port(), free_port()
    store = Store(address={"master": f"127.0.0.1:{master}"})
    # Leases must outlast a batch, or gets fail.
    options = f"--rpc_address=127.0.0.1 --rpc_port={master} --metrics_port={free_port()}"
    lease = "--eviction_high_watermark_ratio=0.95 --default_kv_lease_ttl=5000"
    command = [program("mooncake_master"), *options.split(), *lease.split()]
    run(store, directory, command, master)
    lent = f"--host=127.0.0.1 --port={port} --protocol=tcp --metadata_server=P2PHANDSHAKE"
    size = f"--master_server_address=127.0.0.1:{master} --global_segment_size={CAPACITY}"
    run(store, directory, [program("mooncake_client"), *lent.split(), *size.split()], port)
    time.sleep(1)  # It listens before the master knows of its memory.
    return store


def openlake(directory: Path) -> Store:
    """Its mode for blocks: data in shared memory, control over TCP; one block size for its life."""
    agent = free_port()
    config = directory / "openlake.toml"
    config.write_text(
        f"""
        self_id = 0
        mode = "kv"
        transport = "h2"
        rpc_addr = "127.0.0.1:{agent}"
        kv_agents = ["127.0.0.1:{agent}"]
        s3_addr = "127.0.0.1:{free_port()}"
        region = "none"
        data_dirs = []
        set_drive_count = 1
        default_parity_count = 1
        [[credentials]]
        access_key = "bench"
        secret_key = "bench"
        [[nodes]]
        id = 0
        rpc_addr = "127.0.0.1:{agent}"
        disk_count = 0
        [kv_slab]
        capacity_gb = {CAPACITY >> 30}
        reserve_ttl_secs = 60
        """
    )
    store = Store(address={"agent": f"127.0.0.1:{agent}"})
    run(store, directory, [program("openlaked"), "--config", str(config)], agent)
    store.shared_pattern = f"openlake_kv_{store.process_ids[0]}_*"
    return store


def floor(directory: Path, *, unix: bool) -> Store:
    """A blocking process for each client: floor.py."""
    store = Store()
    for client in range(CLIENTS_MAX):
        ready = directory / f"floor-{client}.sock" if unix else free_port()
        store.address[str(client)] = str(ready)
        serve = str(Path(__file__).with_name("floor.py"))
        run(store, directory, [sys.executable, serve, str(ready)], ready)
    return store
