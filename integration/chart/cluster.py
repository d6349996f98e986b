"""What makes nodes a cluster, and has them leave it well.

As policy.py: a rule returns its complaints; damages.py breaks each.
"""

from __future__ import annotations

from manifests import (
    Manifest,
    config,
    differences,
    environment,
    of_kind,
    pod,
    seconds,
    server,
    workload,
)
from policy import Rule

ADMIN = "admin"
# What a server takes at most to close its disk once it has drained, and to end: src/server.rs,
# cli/serve.rs.
END_SECONDS = 6 + 5


def gossip(manifests: list[Manifest]) -> int | None:
    """The port of gossip, if the nodes are a cluster."""
    listen = config(manifests).get("cluster", {}).get("listen", "none")
    return None if listen == "none" else int(listen.rsplit(":", 1)[1])


def peers_find_one_another(manifests: list[Manifest]) -> list[str]:
    """Nodes of a cluster have a port for gossip, by UDP, look for one another under the name of the
    headless Service, which lists it, and say their pods' addresses; others have none of it."""
    port, container = gossip(manifests), server(manifests)
    names = environment(container)
    asked = {n: v for n, v in names.items() if n.startswith("KV_CLUSTER__")}
    ports = [p for p in container["ports"] if p["name"] == "gossip"]
    listed = {
        s["metadata"]["name"]: [p for p in s["spec"]["ports"] if p["name"] == "gossip"]
        for s in of_kind(manifests, "Service")
    }
    if port is None:
        found = [*asked, *ports, *(s for s, p in listed.items() if p)]
        return [f"no cluster, but {found}"] if found else []
    problems = []
    if ports != [{"name": "gossip", "containerPort": port, "protocol": "UDP"}]:
        problems.append(f"ports of the container: {ports}, the config says {port}")
    wanted = [{"name": "gossip", "port": port, "targetPort": "gossip", "protocol": "UDP"}]
    problems += [
        f"{service} lists {found}"
        for service, found in listed.items()
        if found != (wanted if service.endswith("-headless") else [])
    ]
    nodes = workload(manifests)
    headless = next(s for s in listed if s.endswith("-headless"))
    expected = {"KV_CLUSTER__ADVERTISE": f"$(POD_IP):{port}"}
    if "seeds" not in config(manifests)["cluster"]:
        namespace = nodes["metadata"]["namespace"]
        expected["KV_CLUSTER__SEEDS"] = f"{headless}.{namespace}.svc:{port}"
    problems += differences(names, expected | {}, "env")
    if set(asked) != set(expected):
        problems.append(f"variables {sorted(asked)}")
    order = list(names)
    problems += differences(names, {"POD_IP": {"fieldRef": {"fieldPath": "status.podIP"}}}, "env")
    if not problems and order.index("POD_IP") > order.index("KV_CLUSTER__ADVERTISE"):
        problems.append("POD_IP must come first, for KV_CLUSTER__ADVERTISE uses it")
    return problems


def nodes_leave_before_they_end(manifests: list[Manifest]) -> list[str]:
    """A hook drains each node before it is told to end, over a socket that nobody else can reach,
    and there is time for both."""
    container, spec = server(manifests), pod(manifests)
    hook = {"exec": {"command": ["/usr/bin/kvstrata", "drain", "--wait"]}}
    problems = differences(container.get("lifecycle", {}), {"preStop": hook}, "lifecycle")
    listen = config(manifests)["server"].get("admin_listen", "")
    if environment(container).get("KVSTRATA_ADMIN") != listen:
        problems.append(f"the hook asks elsewhere than at {listen}")
    directory = listen.removeprefix("unix:").rpartition("/")[0]
    mounts = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == ADMIN]
    if not listen.startswith("unix:/") or mounts != [directory]:
        problems.append(f"the socket is {listen}, its directory is mounted as {mounts}")
    volumes = [v for v in spec["volumes"] if v["name"] == ADMIN]
    if [set(v) for v in volumes] != [{"name", "emptyDir"}]:
        problems.append(f"the directory of the socket is {volumes}")
    drain = seconds(config(manifests)["server"]["drain_grace"])
    grace = spec["terminationGracePeriodSeconds"]
    if grace <= drain + END_SECONDS:
        problems.append(f"{grace} s for a drain of {drain} s and an end of {END_SECONDS} s")
    return problems


RULES: list[Rule] = [peers_find_one_another, nodes_leave_before_they_end]
