"""Three nodes of one cluster, in two zones, each with a small dram, a disk and one bucket for all,
so that blocks move between the tiers.
"""

from __future__ import annotations

import time
from pathlib import Path

from server import Server
from starting import Start

NAMES = ("kvstrata-0", "kvstrata-1", "kvstrata-2")
ZONES = ("a", "a", "b")
DEADLINE_SECONDS = 30.0


def cluster(start: Start, home: Path, *settings: str) -> list[Server]:
    """Starts them, and returns when each lists all."""
    secret = home / "identity"
    secret.write_text("5a" * 32 + "\n")
    secret.chmod(0o600)
    nodes: list[Server] = []
    for name, zone in zip(NAMES, ZONES, strict=True):
        seeds = ",".join(node.gossip for node in nodes if node.gossip is not None)
        own = [
            f"node.name={name}",
            f"node.host=host-{name[-1]}",
            f"node.zone={zone}",
            "cluster.listen=127.0.0.1:0",
            f"cluster.seeds={seeds or 'none'}",
            f"identity.secret_file={secret}",
            f"nvme.path={home / name}",
            f"object.url=file://{home / 'bucket'}",
            "object.admission=all",
            "object.pack_bytes=1MiB",
        ]
        nodes.append(start(*own, *settings))
    deadline = time.monotonic() + DEADLINE_SECONDS
    for node in nodes:
        while node.metric("kvstrata_cluster_members") != len(nodes):
            assert time.monotonic() < deadline, f"{node.grpc} does not list all"
            time.sleep(0.05)
    return nodes
