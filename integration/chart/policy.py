"""What every rendering of the chart must hold, as small rules over its manifests.

A rule returns its complaints. damages.py lists ways to break each rule; check.py applies them to
good manifests and expects the complaint, so a rule that never fires is a failure itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import standards
from manifests import (
    Manifest,
    binary_bytes,
    config,
    differences,
    environment,
    generated_secrets,
    is_agent,
    of_kind,
    pod,
    seconds,
    server,
    template,
    workload,
)

Rule = Callable[[list[Manifest]], list[str]]

SELECTOR_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
PROBES = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
NVME, SOCKET, ADMIN = "nvme", "socket", "admin"
# What an agent may violate of the standard "restricted": it shares directories of the host with
# engines, which are root.
AGENT_VIOLATIONS = {"volume_types", "not_root", "not_user_0"}


def pods_are_restricted(manifests: list[Manifest]) -> list[str]:
    """Pods pass the pod security standard "restricted", but for what agents and hostPath need."""
    violated = standards.violations(template(manifests)["metadata"], pod(manifests))
    volumes = pod(manifests)["volumes"]
    allowed = AGENT_VIOLATIONS if is_agent(manifests) else set()
    if any(v["name"] == NVME and "hostPath" in v for v in volumes):
        allowed = allowed | {"volume_types"}
    problems = [f"{name}: {why}" for name, why in violated.items() if name not in allowed]
    for test in of_kind(manifests, "Pod"):
        found = standards.violations(test["metadata"], test["spec"])
        problems += [f"test: {name}: {why}" for name, why in found.items()]
    return problems


def pods_write_nowhere_else(manifests: list[Manifest]) -> list[str]:
    """Beyond the standard: a root file system that is read-only, one fixed user and its group."""
    specs = [pod(manifests)] + [p["spec"] for p in of_kind(manifests, "Pod")]
    problems = []
    for spec in specs:
        problems += standards.of_containers(spec, "readOnlyRootFilesystem", True)
        context = spec["securityContext"]
        users = {context.get(field) for field in ("runAsUser", "runAsGroup", "fsGroup")}
        if len(users) != 1 or (users == {0} and not is_agent(manifests)):
            problems.append(f"runAsUser, runAsGroup and fsGroup are {users}")
    return problems


def pods_have_no_rights_and_no_links(manifests: list[Manifest]) -> list[str]:
    """Pods get no API token and no variables named after Services."""
    expected = {"automountServiceAccountToken": False, "enableServiceLinks": False}
    problems = differences(pod(manifests), expected, "pod")
    for test in of_kind(manifests, "Pod"):
        problems += differences(test["spec"], expected, "test")
    for account in of_kind(manifests, "ServiceAccount"):
        problems += differences(account, {"automountServiceAccountToken": False}, "account")
    return problems


def volumes_are_safe(manifests: list[Manifest]) -> list[str]:
    """Configuration is readable by the group only and mounted read-only; nvme and the directory of
    the admin socket are writable, for agents that of the clients' socket, and nothing else."""
    writable = {NVME, ADMIN, SOCKET} if is_agent(manifests) else {NVME, ADMIN}
    problems = [
        f"{m['name']} is writable"
        for m in server(manifests)["volumeMounts"]
        if not m.get("readOnly") and m["name"] not in writable
    ]
    for volume in pod(manifests)["volumes"]:
        if volume["name"] in writable:
            continue
        if set(volume) != {"name", "projected"}:
            problems.append(f"{volume['name']} is not a projected volume")
        elif volume["projected"].get("defaultMode") != 0o440:
            problems.append(f"{volume['name']} can be read by others")
    return problems


def nvme_has_its_volume(manifests: list[Manifest]) -> list[str]:
    """The nvme tier, and nothing else, has a volume of its own, which the tier cannot outgrow."""
    settings = config(manifests).get("nvme", {})
    claims = workload(manifests)["spec"].get("volumeClaimTemplates", [])
    volumes = [v for v in pod(manifests)["volumes"] if v["name"] == NVME]
    mounts = [m for m in server(manifests)["volumeMounts"] if m["name"] == NVME]
    names = [c["metadata"]["name"] for c in claims] + [v["name"] for v in volumes]
    wanted = [NVME] if settings else []
    problems = [] if names == wanted else [f"volumes {names}, needed: {wanted}"]
    paths = [settings["path"]] if settings else []
    if [m["mountPath"] for m in mounts] != paths:
        problems.append(f"mounted as {mounts}, the config says {settings.get('path')}")
    problems += [f"{m['mountPath']} cannot be written" for m in mounts if m.get("readOnly")]
    claims += [v["ephemeral"]["volumeClaimTemplate"] for v in volumes if "ephemeral" in v]
    for found in claims:
        modes, labels = found["spec"].get("accessModes"), set(found["metadata"].get("labels", {}))
        if modes != ["ReadWriteOnce"]:
            problems.append(f"the claim has access modes {modes}")
        if labels != SELECTOR_LABELS:
            problems.append(f"the claim template, which cannot change, has labels {labels}")
    for directory in (v["emptyDir"] for v in volumes if "emptyDir" in v):
        limit = binary_bytes(directory.get("sizeLimit", "0Mi"))
        capacity = binary_bytes(settings.get("capacity", "1TiB").removesuffix("B"))
        if capacity > limit * 0.95:
            problems.append(f"a capacity of {capacity} bytes in a directory of {limit} bytes")
    return problems


def agents_share_a_socket(manifests: list[Manifest]) -> list[str]:
    """Agents, and nobody else, have a Unix socket, in a directory of the host at the same path."""
    listen = config(manifests)["server"]
    volumes = {v["name"]: v for v in pod(manifests)["volumes"]}
    mounts = {m["name"]: m["mountPath"] for m in server(manifests)["volumeMounts"]}
    if not is_agent(manifests):
        found = [n for n in ("bulk_unix", "shared_memory") if n in listen]
        return found + [n for n in (SOCKET,) if n in volumes or n in mounts]
    directory, _, _name = listen.get("bulk_unix", "").rpartition("/")
    host = volumes.get(SOCKET, {}).get("hostPath", {}).get("path")
    there = {host, mounts.get(SOCKET)} == {directory}
    return [] if there else [f"socket in {directory}, mounted {host} at {mounts.get(SOCKET)}"]


def probes_ask_the_server(manifests: list[Manifest]) -> list[str]:
    """Each probe asks its own page on the http port, by TLS where the server speaks it."""
    problems = []
    scheme = {"scheme": "HTTPS"} if "tls" in config(manifests) else {}
    for name, page in PROBES.items():
        asked = server(manifests).get(name, {}).get("httpGet")
        wanted = {"path": page, "port": "http"} | scheme
        if asked != wanted:
            problems.append(f"{name} asks {asked}, not {wanted}")
    return problems


def grace_exceeds_drain(manifests: list[Manifest]) -> list[str]:
    """The kubelet waits longer than the server drains."""
    grace = pod(manifests)["terminationGracePeriodSeconds"]
    drain = config(manifests)["server"]["drain_grace"]
    return [] if grace >= seconds(drain) + 5 else [f"{grace} s of grace for a drain of {drain}"]


def memory_is_guaranteed(manifests: list[Manifest]) -> list[str]:
    """Memory is limited, and requested in full."""
    resources = server(manifests)["resources"]
    limit = resources.get("limits", {}).get("memory")
    request = resources.get("requests", {}).get("memory")
    return [] if limit and limit == request else [f"memory: request {request}, limit {limit}"]


def ports_agree(manifests: list[Manifest]) -> list[str]:
    """Config, container and Services name the same ports, each with its protocol."""
    listen = config(manifests)["server"]
    expected = {
        name: int(address.rsplit(":", 1)[1])
        for name in ("grpc", "http", "bulk", "resp")
        if (address := listen.get(f"{name}_listen", "none")) != "none"
    }
    container = server(manifests)["ports"]
    lists = {"container": container}
    lists |= {s["metadata"]["name"]: s["spec"]["ports"] for s in of_kind(manifests, "Service")}
    problems = []
    for owner, ports in lists.items():
        # That of gossip, by UDP, is looked at in cluster.py.
        ports = [p for p in ports if p["name"] != "gossip"]
        found = {p["name"]: p.get("containerPort", p.get("port")) for p in ports}
        if found != expected:
            problems.append(f"{owner} has ports {found}, the config says {expected}")
        problems += [
            f"{owner}: port {p['name']} has no protocol"
            for p in ports
            if p.get("protocol") != "TCP"
        ]
        problems += [
            f"{owner}: port {p['name']} has target {p.get('targetPort')}"
            for p in ports
            if owner != "container" and p.get("targetPort") != p["name"]
        ]
    return problems


def selectors_are_stable(manifests: list[Manifest]) -> list[str]:
    """Selectors name the release and nothing else, and match the pods."""
    labels = template(manifests)["metadata"]["labels"]
    selectors = {"nodes": workload(manifests)["spec"]["selector"]["matchLabels"]}
    for service in of_kind(manifests, "Service"):
        selectors[service["metadata"]["name"]] = service["spec"]["selector"]
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        selectors["PodDisruptionBudget"] = budget["spec"]["selector"]["matchLabels"]
    for policy in of_kind(manifests, "NetworkPolicy"):
        selectors["NetworkPolicy"] = policy["spec"]["podSelector"]["matchLabels"]
    tests = [p["metadata"]["labels"] for p in of_kind(manifests, "Pod")]
    problems = [
        f"{owner} selects the pod of the test"
        for owner, selector in selectors.items()
        for test in tests
        if selector.items() <= test.items()
    ]
    for owner, selector in selectors.items():
        if set(selector) != SELECTOR_LABELS:
            problems.append(f"{owner} selects by {sorted(selector)}")
        if not selector.items() <= labels.items():
            problems.append(f"{owner} does not select the pods")
    return problems + [
        f"pods carry {name}, and would restart with every chart version"
        for name in labels
        if name in ("helm.sh/chart", "app.kubernetes.io/version")
    ]


def workload_starts_together(manifests: list[Manifest]) -> list[str]:
    """Nodes start in parallel behind a headless Service that exists and lists them at once; the
    Services of agents stay on their host."""
    found = workload(manifests)["spec"]
    headless = [s for s in of_kind(manifests, "Service") if s["spec"].get("clusterIP") == "None"]
    problems = []
    if is_agent(manifests):
        clients = [s for s in of_kind(manifests, "Service") if s not in headless]
        wanted = {"internalTrafficPolicy": "Local"}
        problems += [p for s in clients for p in differences(s["spec"], wanted, "Service")]
    else:
        problems += differences(found, {"podManagementPolicy": "Parallel"}, "StatefulSet")
        if [s["metadata"]["name"] for s in headless] != [found["serviceName"]]:
            problems.append(f"serviceName {found['serviceName']} is not the headless Service")
    return problems + [
        f"{s['metadata']['name']} hides nodes that are not ready"
        for s in headless
        if not s["spec"].get("publishNotReadyAddresses")
    ]


def command_reads_the_config(manifests: list[Manifest]) -> list[str]:
    """The server is started on the mounted config and finds its secrets where that says."""
    container = server(manifests)
    mount = container["volumeMounts"][0]
    items = {
        f"{mount['mountPath']}/{item['path']}"
        for source in pod(manifests)["volumes"][0]["projected"]["sources"]
        for item in source[next(iter(source))]["items"]
    }
    settings = config(manifests)
    wanted = {"/etc/kvstrata/config.toml", settings["identity"]["secret_file"]}
    wanted |= {path for key, path in settings["auth"].items() if key.endswith("_file")}
    wanted |= set(settings.get("tls", {}).values())
    problems = [] if items == wanted else [f"files mounted: {items}, needed: {wanted}"]
    if container["args"] != ["serve", "--config", "/etc/kvstrata/config.toml"]:
        problems.append(f"args are {container['args']}")
    return problems


def nodes_are_told_apart(manifests: list[Manifest]) -> list[str]:
    """Each node goes by its pod's name, an agent by its host's, knows its host, and tells clients
    an address of its own."""
    names = environment(server(manifests))
    name = "spec.nodeName" if is_agent(manifests) else "metadata.name"
    expected = {
        "KV_NODE__NAME": {"fieldRef": {"fieldPath": name}},
        "KV_NODE__HOST": {"fieldRef": {"fieldPath": "spec.nodeName"}},
    }
    port = config(manifests)["server"]["grpc_listen"].rsplit(":", 1)[1]
    uses = "KV_NODE__NAME"
    if is_agent(manifests):
        uses = "POD_IP"
        expected |= {
            uses: {"fieldRef": {"fieldPath": "status.podIP"}},
            "KV_NODE__ADVERTISE": f"$(POD_IP):{port}",
        }
    elif "advertise" not in config(manifests).get("node", {}):
        nodes = workload(manifests)
        service = f"{nodes['spec']['serviceName']}.{nodes['metadata']['namespace']}"
        expected["KV_NODE__ADVERTISE"] = f"$(KV_NODE__NAME).{service}.svc:{port}"
    elif "KV_NODE__ADVERTISE" in names:
        return ["KV_NODE__ADVERTISE hides the address that the values give"]
    problems = differences(names, expected, "env")
    order = list(names)
    if "KV_NODE__ADVERTISE" in names and order.index(uses) > order.index("KV_NODE__ADVERTISE"):
        problems.append(f"{uses} must come first, for KV_NODE__ADVERTISE uses it")
    return problems


def others_are_kept_out(manifests: list[Manifest]) -> list[str]:
    """The server asks for tokens, or says plainly that it does not."""
    auth = config(manifests).get("auth", {})
    kinds = [{"tokens_file"}, {"allow_anonymous"}]
    return [] if set(auth) in kinds and all(auth.values()) else [f"auth is {auth}"]


def protocols_are_named(manifests: list[Manifest]) -> list[str]:
    """Services say what is spoken on the gRPC port."""
    wanted = "https" if "tls" in config(manifests) else "kubernetes.io/h2c"
    return [
        f"{service['metadata']['name']}: grpc is {port.get('appProtocol')}, not {wanted}"
        for service in of_kind(manifests, "Service")
        for port in service["spec"]["ports"]
        if port["name"] == "grpc" and port.get("appProtocol") != wanted
    ]


def image_is_pinned(manifests: list[Manifest]) -> list[str]:
    """There is one image, and it has a version or a digest."""
    tests = [p["spec"] for p in of_kind(manifests, "Pod")]
    images = {c["image"] for spec in [pod(manifests), *tests] for c in standards.containers(spec)}
    pinned = [i for i in images if re.search(r"(@sha256:[0-9a-f]{64}|:\d[\w.+-]*)$", i)]
    return [] if len(images) == len(pinned) == 1 else [f"images {images}"]


def secrets_are_kept(manifests: list[Manifest]) -> list[str]:
    """A generated secret outlives the release, and is mounted nowhere else than as a file."""
    problems = [
        f"{s['metadata']['name']} goes with the release"
        for s in of_kind(manifests, "Secret")
        if s["metadata"]["annotations"].get("helm.sh/resource-policy") != "keep"
    ]
    text = str([m for m in manifests if m["kind"] != "Secret"])
    return problems + [
        "a secret's value is in another manifest"
        for value in generated_secrets(manifests)
        if value in text
    ]


RULES: list[Rule] = [
    pods_are_restricted,
    pods_write_nowhere_else,
    pods_have_no_rights_and_no_links,
    volumes_are_safe,
    nvme_has_its_volume,
    agents_share_a_socket,
    probes_ask_the_server,
    grace_exceeds_drain,
    memory_is_guaranteed,
    ports_agree,
    selectors_are_stable,
    workload_starts_together,
    command_reads_the_config,
    nodes_are_told_apart,
    others_are_kept_out,
    protocols_are_named,
    image_is_pinned,
    secrets_are_kept,
]
