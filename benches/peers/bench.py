"""Measures kvstrata beside its peers, in the same interleaved rounds on one machine.

    benches/peers/run.sh [--rounds N] [--only NAME ...] [--out DIRECTORY]

For each block size all servers start, every target gets clients in processes of their own, and
each round goes once over all targets: puts of new blocks one by one, gets one by one, gets of 64 at
once. Processor time is that of the clients and of the server's processes together. Then every store
is filled past its capacity, for the memory that it needs. Lookups have servers of their own, with
small blocks. What is not measured: other machines, disks, durability, blocks that are not there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import clients
import report
import stores
import worker
from stores import Store, UnavailableError

BLOCKS = {2 << 20: 64, 64 << 10: 512}
ASK_BLOCK = 64
ASK_BLOCKS = 32768
FILL = 1.25
PHASES = ("put", "get", "batch")
ANSWER_SECONDS = 300.0
FORK = multiprocessing.get_context("fork")

Start = Callable[[Path], Store]


@dataclass
class Target:
    """A row of the tables: a client, and the server that it talks to, if there is one."""

    name: str
    client: type[clients.Client]
    start: Start | None = None
    store: Store | None = None
    pipes: list[Connection] = field(default_factory=list)
    processes: list[ForkProcess] = field(default_factory=list)

    @property
    def servers(self) -> list[int]:
        """The processes of the server."""
        return self.store.process_ids if self.store else []

    def tell(self, message: tuple[Any, ...], index: int) -> Any:
        """Has one client do something, and waits for its answer."""
        self.pipes[index].send(message)
        return self.answer(index)

    def answer(self, index: int) -> Any:
        """What a client answers; raises what it raised."""
        if not self.pipes[index].poll(ANSWER_SECONDS):
            raise RuntimeError(f"no answer within {ANSWER_SECONDS} s")
        answer = self.pipes[index].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def targets() -> list[Target]:
    """All rows, in the order of the tables."""
    tcp = functools.partial(stores.kvstrata, unix=False)
    unix = functools.partial(stores.kvstrata, unix=True)
    shared = functools.partial(stores.kvstrata, unix=True, shared=True)
    floors = {unix: functools.partial(stores.floor, unix=unix) for unix in (False, True)}
    return [
        Target("floor: memcpy", clients.Memcpy),
        Target("floor: TCP", clients.Floor, floors[False]),
        Target("floor: Unix", clients.Floor, floors[True]),
        Target("kvstrata, TCP", clients.Kvstrata, tcp),
        Target("kvstrata, gRPC", clients.KvstrataGrpc, tcp),
        Target("kvstrata, Unix", clients.Kvstrata, unix),
        Target("kvstrata, shared memory", clients.KvstrataShared, shared),
        Target("redis", clients.Redis, stores.redis),
        Target("memcached", clients.Memcached, stores.memcached),
        Target("Mooncake, TCP", clients.Mooncake, stores.mooncake),
        Target("OpenLake, shared memory", clients.OpenLake, stores.openlake),
    ]


def ask_targets() -> list[Target]:
    """The rows of the lookups: whatever can be asked."""
    asked = [target for target in targets() if not target.name.startswith("floor")]
    return [*asked, Target("Dynamo radix tree, in process", clients.Dynamo)]


class Stage:
    """All servers and clients for one block size; what fails is left out, and its reason kept."""

    def __init__(self, wanted: list[Target], size: int, blocks: int, count: int) -> None:
        self.size, self.blocks = size, blocks
        self.left_out: dict[str, str] = {}
        self.targets: list[Target] = []
        self.directory = tempfile.TemporaryDirectory(prefix="peers-")
        self.started: dict[Start, Store] = {}
        length = max(blocks * size, 1 << 20)
        self.memories = [(mmap.mmap(-1, length), mmap.mmap(-1, length)) for _ in range(count)]
        for target in wanted:
            with self.surviving(target):
                self.start(target, count)
                self.targets.append(target)

    @contextlib.contextmanager
    def surviving(self, target: Target) -> Iterator[None]:
        """Leaves a target out if what is done with it fails."""
        try:
            yield
        except (UnavailableError, RuntimeError, OSError) as error:
            print(f"left out: {target.name}: {error}", flush=True)
            self.left_out[target.name] = str(error)
            self.targets = [other for other in self.targets if other is not target]
            for process in target.processes:
                process.terminate()

    def start(self, target: Target, count: int) -> None:
        """Its server, unless it runs, and its clients."""
        if target.start:
            if target.start not in self.started:
                directory = tempfile.mkdtemp(dir=self.directory.name)
                self.started[target.start] = target.start(Path(directory))
            target.store = self.started[target.start]
        address = target.store.address if target.store else {}
        for index in range(count):
            ours, theirs = FORK.Pipe()
            arguments = (target.client, address, index, self.size, self.memories[index], theirs)
            process = FORK.Process(target=worker.main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            target.pipes.append(ours)
            target.processes.append(process)
            target.answer(index)

    def stop(self) -> None:
        """Ends clients, then servers."""
        for target in self.targets:
            for pipe in target.pipes:
                pipe.close()
            for process in target.processes:
                process.terminate()
                process.join()
        for store in self.started.values():
            store.stop()
        self.directory.cleanup()


def cpu_seconds(processes: list[int]) -> float:
    """Processor time of other processes, all their threads, in nanoseconds' steps."""
    return sum(time.clock_gettime((~process << 3) | 2) for process in processes)


def phase(target: Target, kind: str, keys: list[list[str]], size: int) -> dict[str, Any]:
    """One phase of all its clients at once."""
    everyone = range(len(keys))
    for index in everyone:
        target.pipes[index].send(("prepare", kind, keys[index]))
    for index in everyone:
        target.answer(index)
    before = cpu_seconds(target.servers)
    for index in everyone:
        target.pipes[index].send(("work", kind, keys[index]))
    done: list[worker.Phase] = [target.answer(index) for index in everyone]
    server = cpu_seconds(target.servers) - before
    wrong = sum(each.wrong for each in done)
    if wrong:
        raise RuntimeError(f"{kind}: {wrong} blocks with other bytes than were put")
    return {
        "target": target.name,
        "size": size,
        "clients": len(keys),
        "phase": kind,
        "bytes": sum(each.bytes for each in done),
        "seconds": max(each.ended for each in done) - min(each.began for each in done),
        "client_cpu": sum(each.cpu for each in done),
        "server_cpu": server,
        "latencies": [taken for each in done for taken in each.latencies],
    }


def rounds(stage: Stage, count: int, clients_count: int) -> list[dict[str, Any]]:
    """Interleaved rounds; the first one warms up and touches the memory of the stores."""
    rows = []
    for number in range(count + 1):
        at = number % max(1, len(stage.targets))  # Another one begins in each round.
        for target in stage.targets[at:] + stage.targets[:at]:
            with stage.surviving(target):
                tag = f"{clients_count}.{number}"
                everyone = range(clients_count)
                keys = [worker.names(stage.size, at, tag, stage.blocks) for at in everyone]
                got = [phase(target, kind, keys, stage.size) for kind in PHASES]
                for index in everyone:
                    target.tell(("remove", keys[index]), index)
                rows += got if number > 0 else []
        print(
            f"{report.block_name(stage.size)}, {clients_count} clients: round {number}", flush=True
        )
    return rows


def fill(stage: Stage) -> list[dict[str, Any]]:
    """Puts more than a store holds; what is still there, and the memory that it takes."""
    rows = []
    keys = worker.names(stage.size, 0, "fill", int(stores.CAPACITY * FILL) // stage.size)
    seen: list[Store] = []
    for target in list(stage.targets):
        if target.store is None or target.store in seen or target.name.startswith("floor"):
            continue
        seen.append(target.store)
        with stage.surviving(target):
            target.tell(("put_all", keys), 0)
            present = target.tell(("present", keys), 0) * stage.size
            memory = target.store.memory_bytes()
            rows.append(
                {"target": target.name, "size": stage.size, "present": present, "memory": memory}
            )
            print(f"filled: {rows[-1]}", flush=True)
    return rows


def ask(stage: Stage) -> list[dict[str, Any]]:
    """Questions for blocks that are all there, by one client."""
    rows = []
    keys = worker.names(stage.size, 0, "ask", ASK_BLOCKS)
    for target in list(stage.targets):
        with stage.surviving(target):
            if target.client is not clients.KvstrataGrpc:  # The same server has them.
                target.tell(("put_all", keys), 0)
            for question, taken in target.tell(("ask", keys), 0).items():
                rows.append({"target": target.name, "question": question, "seconds": taken})
            print(f"asked: {target.name}", flush=True)
    return rows


def chosen(all_targets: list[Target], only: list[str] | None) -> list[Target]:
    """Those whose names contain one of `only`."""
    return [t for t in all_targets if only is None or any(part in t.name for part in only)]


def machine() -> str:
    """What it ran on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return f"{os.cpu_count()} cores of {model}, {memory} GiB, Linux {platform.release()}"


def main() -> None:
    """Runs everything, and writes what was measured, the table and the charts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds after the first (15)")
    parser.add_argument("--only", nargs="*", help="parts of the names of targets (all)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="for table.md and the charts"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "load": [], "rows": [], "memory": []}
    results["targets"] = [target.name for target in targets()]
    left_out: dict[str, str] = {}
    for size, blocks in BLOCKS.items():
        stage = Stage(chosen(targets(), options.only), size, blocks, stores.CLIENTS_MAX)
        try:
            for count in (1, stores.CLIENTS_MAX):
                results["rows"] += rounds(stage, options.rounds, count)
                results["load"].append(round(os.getloadavg()[0], 1))
            results["memory"] += fill(stage)
        finally:
            stage.stop()
        left_out |= stage.left_out
    stage = Stage(chosen(ask_targets(), options.only), ASK_BLOCK, 1, 1)
    try:
        results["questions"] = ask(stage)
    finally:
        stage.stop()
    results["left_out"] = left_out | stage.left_out
    report.RESULTS.write_text(json.dumps(results))
    report.write(results, options.out)


if __name__ == "__main__":
    main()
