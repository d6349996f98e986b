"""Load on the nodes, from the clients' pod: engines that replay a trace, and a client of values."""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from kube import NODES, Cluster, Failed, endpoint

ENGINES, VALUE_BYTES = 6, 64 * 1024
TRACE = "/tmp/trace.jsonl.zst"
SIZES = ("--sessions", "12", "--duration", "60m", "--turns-max", "40")
# Rules of replay that hold for one server only: in a cluster, engines that start together each
# store what they do not know yet that others have, and what a node has is no promise of another.
OF_ONE_SERVER = (
    "blocks stored again that had not left",
    "blocks found and gone, although nothing was evicted",
)


@dataclass
class Pass:
    """One pass of all engines over the trace."""

    started: float
    report: dict[str, Any] = field(default_factory=dict)
    # Why it has ended before its end.
    stopped: str = ""

    def wrong(self) -> list[str]:
        """What may never be."""
        counts = ("wrong_bytes", "corrupt_blocks", "lease_failures")
        found = [f"{name}: {self.report[name]}" for name in counts if self.report.get(name)]
        problems = self.report.get("problems", [])
        return found + [p for p in problems if not p.startswith(OF_ONE_SERVER)]

    def __str__(self) -> str:
        """A line of the transcript."""
        if self.stopped:
            return f"stopped: {self.stopped}"
        report = self.report
        return (
            f"{report['references']:,} blocks asked, {report['hit_ratio']:.2%} hits "
            f"(dram {report['hits_dram']:,}, nvme {report['hits_nvme']:,}; "
            f"{report['hits_remote']:,} of them on another node), "
            f"{report['checked_bytes']:,} bytes checked, {report['wrong_bytes']} wrong"
        )


def replay(cluster: Cluster) -> Pass:
    """All engines replay the trace once, and check every byte."""
    one = Pass(time.monotonic())
    where = ("--endpoint", endpoint(*NODES), "--clients", str(ENGINES))
    done = cluster.client("replay", TRACE, *where, "--block-bytes", "8KiB", "--json")
    if done.stdout:
        one.report = json.loads(done.stdout)
    else:
        one.stopped = done.stderr.partition(";")[0].strip()
    return one


def fill(cluster: Cluster) -> Pass:
    """Makes the trace, and puts its blocks."""
    made = cluster.client("gen-trace", TRACE, *SIZES)
    if made.returncode:
        raise Failed(f"gen-trace: {made.stderr.strip()}")
    first = replay(cluster)
    if first.stopped:
        raise Failed(f"replay: {first.stopped}")
    return first


class Engines(threading.Thread):
    """Replays the trace again and again, until it is stopped."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster, self.passes = cluster, list[Pass]()
        self.stopped = threading.Event()

    def run(self) -> None:
        """The load."""
        while not self.stopped.is_set():
            self.passes.append(replay(self.cluster))

    def since(self, moment: float) -> list[Pass]:
        """Passes that have begun after a moment, and reached their end."""
        return [one for one in self.passes if one.started > moment and not one.stopped]

    def end(self) -> None:
        """Stops it."""
        self.stopped.set()
        self.join()


class Values(threading.Thread):
    """Puts values at the first node that answers, and gets them, until it is stopped.

    A miss is no failure: what a node has got last is there again when that node is. The rest is.
    """

    def __init__(self, cluster: Cluster, pods: list[str]) -> None:
        super().__init__()
        self.cluster, self.pods = cluster, pods
        self.stopped = threading.Event()
        self.values, self.missed, self.failures = dict[str, str](), 0, list[str]()

    def run(self) -> None:
        """The load."""
        while not self.stopped.is_set():
            key = f"load-{len(self.values)}"
            self.values[key] = secrets.token_hex(VALUE_BYTES // 2)
            try:
                self.cluster.put(key, self.values[key], *self.pods)
                self.missed += not self.found(key)
            except (Failed, subprocess.TimeoutExpired) as error:
                self.failures.append(str(error))

    def found(self, key: str) -> bool:
        """Whether a value is there; other bytes are a failure."""
        got = self.cluster.get(key, *self.pods)
        if got is not None and got != self.values[key]:
            self.failures.append(f"{key}: other bytes")
        return got is not None

    def end(self) -> None:
        """Stops it."""
        self.stopped.set()
        self.join()
