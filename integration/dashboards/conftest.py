"""Three nodes under load, and a Prometheus that scrapes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "console"))

from nodes import NAMES, cluster
from prometheus import Prometheus, impatient, missing, rules
from server import REPOSITORY, Server
from traffic import Traffic, traffic

CHART = REPOSITORY / "helm" / "kvstrata"
ALERTS, DASHBOARDS = CHART / "alerts.yaml", CHART / "dashboards"
TRACE = REPOSITORY / "examples" / "sample-trace.jsonl.zst"
SIZES = (
    "dram.capacity=24MiB",
    "nvme.capacity=96MiB",
    "nvme.segment_bytes=2MiB",
    # It would be used up in minutes.
    "nvme.daily_writes=none",
)


@dataclass
class Watched:
    """The nodes, who watches them, and their load."""

    nodes: list[Server]
    prometheus: Prometheus
    load: Traffic
    tenants: Path
    home: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One cluster for all tests of a file, which break it last."""
    why = missing()
    if why is not None:
        print(f"SKIPPED (dashboards: no Prometheus to ask, {why})", file=sys.stderr)
        pytest.skip(why)
    home = tmp_path_factory.mktemp("dashboards")
    tenants = home / "tenants.toml"
    tenants.write_text('["default"]\ndram_max = "24MiB"\n')
    servers: list[Server] = []

    def start(*settings: str) -> Server:
        servers.append(Server(home, *settings))
        return servers[-1]

    prometheus: Prometheus | None = None
    try:
        nodes = cluster(start, home, *SIZES, f"auth.tenants_file={tenants}")
        pages = {name: node.http for name, node in zip(NAMES, nodes, strict=True)}
        prometheus = Prometheus(home / "prometheus", pages, impatient(rules(ALERTS)))
        with traffic(home, nodes, [TRACE]) as engines:
            yield Watched(nodes, prometheus, engines, tenants, home)
    finally:
        if prometheus is not None:
            prometheus.close()
        for server in servers:
            server.close()
