"""What every rendering of the chart must hold, as small rules over its manifests.

A rule returns its complaints. `DAMAGES` lists ways to break each rule; check.py applies them to
good manifests and expects the complaint, so a rule that never fires is a failure itself.
"""

from __future__ import annotations

import base64
import re
import tomllib
from collections.abc import Callable
from typing import Any

Manifest = dict[str, Any]
Rule = Callable[[list[Manifest]], list[str]]
Damage = Callable[[list[Manifest]], object]

SELECTOR_LABELS = {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
PROBES = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
NVME = "nvme"
UNITS_BYTES = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS_SECONDS = {"h": 3600, "m": 60, "s": 1}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The manifests of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of one kind."""
    (found,) = of_kind(manifests, kind)
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    """The spec of the pods."""
    return one(manifests, "StatefulSet")["spec"]["template"]["spec"]


def server(manifests: list[Manifest]) -> Manifest:
    """The only container."""
    (container,) = pod(manifests)["containers"]
    return container


def claim(manifests: list[Manifest]) -> Manifest:
    """The only claim of the pods."""
    (found,) = one(manifests, "StatefulSet")["spec"]["volumeClaimTemplates"]
    return found


def config(manifests: list[Manifest]) -> dict[str, Any]:
    """The configuration file, read as the server reads it."""
    return tomllib.loads(one(manifests, "ConfigMap")["data"]["config.toml"])


def generated_secrets(manifests: list[Manifest]) -> list[str]:
    """Every value of every Secret, decoded."""
    values = [v for secret in of_kind(manifests, "Secret") for v in secret["data"].values()]
    return [base64.b64decode(value).decode() for value in values]


def differences(found: dict[str, Any], expected: dict[str, Any], where: str) -> list[str]:
    """What differs from the fields expected."""
    return [
        f"{where}.{name} is {found.get(name)!r}, not {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    ]


def seconds(duration: str) -> int:
    """The length of a duration like 1m30s."""
    return sum(int(n) * UNITS_SECONDS[unit] for n, unit in re.findall(r"(\d+)([hms])", duration))


def binary_bytes(size: str) -> int:
    """The bytes of a size like 100Gi."""
    return int(size[:-2]) * UNITS_BYTES[size[-2:]]


def pods_are_restricted(manifests: list[Manifest]) -> list[str]:
    """Pods pass the "restricted" pod security standard, and more."""
    spec, container = pod(manifests), server(manifests)
    context = spec.get("securityContext", {})
    problems = differences(
        context, {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, "pod"
    )
    if not context.get("runAsUser") or context.get("runAsUser") != context.get("fsGroup"):
        problems.append("pod: runAsUser and fsGroup must be one fixed UID that is not 0")
    problems += differences(
        container.get("securityContext", {}),
        {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "container",
    )
    problems += [f"pod: {name} must not be set" for name in spec if name.startswith("host")]
    return problems


def pods_have_no_rights_and_no_links(manifests: list[Manifest]) -> list[str]:
    """Pods get no API token and no variables named after Services."""
    expected = {"automountServiceAccountToken": False, "enableServiceLinks": False}
    return differences(pod(manifests), expected, "pod")


def volumes_are_safe(manifests: list[Manifest]) -> list[str]:
    """Configuration is readable by the group only and mounted read-only; nvme alone is writable."""
    problems = [
        f"{m['name']} is writable"
        for m in server(manifests)["volumeMounts"]
        if not m.get("readOnly") and m["name"] != NVME
    ]
    for volume in pod(manifests)["volumes"]:
        if volume["name"] == NVME and set(volume) == {"name", "emptyDir"}:
            continue
        if set(volume) != {"name", "projected"}:
            problems.append(f"{volume['name']} is not a projected volume")
        elif volume["projected"].get("defaultMode") != 0o440:
            problems.append(f"{volume['name']} can be read by others")
    return problems


def nvme_has_its_volume(manifests: list[Manifest]) -> list[str]:
    """The nvme tier, and nothing else, has a volume: a claim of the pod's own, or a bounded
    directory that the tier cannot outgrow."""
    settings = config(manifests).get("nvme", {})
    claims = one(manifests, "StatefulSet")["spec"].get("volumeClaimTemplates", [])
    directories = [v for v in pod(manifests)["volumes"] if "emptyDir" in v]
    mounts = [m for m in server(manifests)["volumeMounts"] if m["name"] == NVME]
    names = [c["metadata"]["name"] for c in claims] + [v["name"] for v in directories]
    wanted = [NVME] if settings else []
    problems = [] if names == wanted else [f"volumes {names}, needed: {wanted}"]
    paths = [settings["path"]] if settings else []
    if [m["mountPath"] for m in mounts] != paths:
        problems.append(f"mounted as {mounts}, the config says {settings.get('path')}")
    problems += [f"{m['mountPath']} cannot be written" for m in mounts if m.get("readOnly")]
    for claim in claims:
        modes, labels = claim["spec"].get("accessModes"), set(claim["metadata"].get("labels", {}))
        if modes != ["ReadWriteOnce"]:
            problems.append(f"the claim has access modes {modes}")
        if labels != SELECTOR_LABELS:
            problems.append(f"the claim template, which cannot change, has labels {labels}")
    for volume in directories:
        limit = binary_bytes(volume["emptyDir"].get("sizeLimit", "0Mi"))
        capacity = binary_bytes(settings.get("capacity", "1TiB").removesuffix("B"))
        if capacity > limit * 0.95:
            problems.append(f"a capacity of {capacity} bytes in a directory of {limit} bytes")
    return problems


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
    workload = one(manifests, "StatefulSet")["spec"]
    labels = workload["template"]["metadata"]["labels"]
    selectors = {"StatefulSet": workload["selector"]["matchLabels"]}
    for service in of_kind(manifests, "Service"):
        selectors[service["metadata"]["name"]] = service["spec"]["selector"]
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        selectors["PodDisruptionBudget"] = budget["spec"]["selector"]["matchLabels"]
    problems = []
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
    """Nodes start in parallel behind a headless Service that exists and lists them at once."""
    workload = one(manifests, "StatefulSet")["spec"]
    problems = differences(workload, {"podManagementPolicy": "Parallel"}, "StatefulSet")
    headless = [s for s in of_kind(manifests, "Service") if s["spec"].get("clusterIP") == "None"]
    if [s["metadata"]["name"] for s in headless] != [workload["serviceName"]]:
        problems.append(f"serviceName {workload['serviceName']} is not the headless Service")
    problems += [
        f"{s['metadata']['name']} hides nodes that are not ready"
        for s in headless
        if not s["spec"].get("publishNotReadyAddresses")
    ]
    return problems


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
    """Each node goes by its pod's name, and tells clients an address of its own."""
    names = {e["name"]: e.get("valueFrom", e.get("value")) for e in server(manifests)["env"]}
    problems = []
    if names.get("KV_NODE__NAME") != {"fieldRef": {"fieldPath": "metadata.name"}}:
        problems.append("KV_NODE__NAME is not the pod's name")
    if "advertise" in config(manifests).get("node", {}):
        wanted = None
    else:
        workload = one(manifests, "StatefulSet")
        port = config(manifests)["server"]["grpc_listen"].rsplit(":", 1)[1]
        service = f"{workload['spec']['serviceName']}.{workload['metadata']['namespace']}"
        wanted = f"$(KV_NODE__NAME).{service}.svc:{port}"
    found = names.get("KV_NODE__ADVERTISE")
    if found != wanted:
        problems.append(f"KV_NODE__ADVERTISE is {found}, not {wanted}")
    order = list(names)
    if wanted and order.index("KV_NODE__NAME") > order.index("KV_NODE__ADVERTISE"):
        problems.append("KV_NODE__NAME must come first, for the other one uses it")
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
    """The image has a version or a digest."""
    image = server(manifests)["image"]
    pinned = re.search(r"(@sha256:[0-9a-f]{64}|:\d[\w.+-]*)$", image)
    return [] if pinned else [f"image {image}"]


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
    pods_have_no_rights_and_no_links,
    volumes_are_safe,
    nvme_has_its_volume,
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

# One way after another to break a rule.
DAMAGES: list[tuple[Rule, Damage]] = [
    (pods_are_restricted, lambda m: pod(m)["securityContext"].pop("seccompProfile")),
    (pods_are_restricted, lambda m: pod(m)["securityContext"].update(runAsUser=0)),
    (pods_are_restricted, lambda m: pod(m).update(hostNetwork=True)),
    (pods_are_restricted, lambda m: server(m)["securityContext"].pop("capabilities")),
    (pods_are_restricted, lambda m: server(m)["securityContext"].pop("readOnlyRootFilesystem")),
    (pods_have_no_rights_and_no_links, lambda m: pod(m).pop("automountServiceAccountToken")),
    (pods_have_no_rights_and_no_links, lambda m: pod(m).update(enableServiceLinks=True)),
    (volumes_are_safe, lambda m: server(m)["volumeMounts"][0].pop("readOnly")),
    (volumes_are_safe, lambda m: pod(m)["volumes"][0]["projected"].update(defaultMode=0o444)),
    (volumes_are_safe, lambda m: pod(m)["volumes"].append({"name": "x", "hostPath": {}})),
    (volumes_are_safe, lambda m: server(m)["volumeMounts"].append({"name": "x"})),
    (nvme_has_its_volume, lambda m: one(m, "StatefulSet")["spec"].pop("volumeClaimTemplates")),
    (nvme_has_its_volume, lambda m: claim(m)["spec"].update(accessModes=["ReadWriteMany"])),
    (nvme_has_its_volume, lambda m: claim(m)["metadata"]["labels"].update({"helm.sh/chart": "1"})),
    (nvme_has_its_volume, lambda m: server(m)["volumeMounts"].pop()),
    (nvme_has_its_volume, lambda m: server(m)["volumeMounts"][1].update(readOnly=True)),
    (nvme_has_its_volume, lambda m: server(m)["volumeMounts"][1].update(mountPath="/x")),
    (
        nvme_has_its_volume,
        lambda m: pod(m)["volumes"].append({"name": NVME, "emptyDir": {"sizeLimit": "1Gi"}}),
    ),
    (probes_ask_the_server, lambda m: server(m).pop("livenessProbe")),
    (probes_ask_the_server, lambda m: server(m)["readinessProbe"]["httpGet"].update(path="/livez")),
    (grace_exceeds_drain, lambda m: pod(m).update(terminationGracePeriodSeconds=20)),
    (memory_is_guaranteed, lambda m: server(m)["resources"].pop("limits")),
    (memory_is_guaranteed, lambda m: server(m)["resources"]["requests"].update(memory="1Gi")),
    (ports_agree, lambda m: server(m)["ports"][0].pop("protocol")),
    (ports_agree, lambda m: server(m)["ports"][0].update(containerPort=1)),
    (ports_agree, lambda m: of_kind(m, "Service")[0]["spec"]["ports"][1].pop("protocol")),
    (ports_agree, lambda m: of_kind(m, "Service")[1]["spec"]["ports"].pop()),
    (selectors_are_stable, lambda m: of_kind(m, "Service")[0]["spec"]["selector"].update(v="1")),
    (
        selectors_are_stable,
        lambda m: one(m, "StatefulSet")["spec"]["template"]["metadata"]["labels"].update(
            {"helm.sh/chart": "kvstrata-0.1.0"}
        ),
    ),
    (
        selectors_are_stable,
        lambda m: one(m, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].update(
            {"app.kubernetes.io/name": "other"}
        ),
    ),
    (workload_starts_together, lambda m: one(m, "StatefulSet")["spec"].pop("podManagementPolicy")),
    (workload_starts_together, lambda m: one(m, "StatefulSet")["spec"].update(serviceName="x")),
    (workload_starts_together, lambda m: of_kind(m, "Service")[0]["spec"].pop("clusterIP")),
    (command_reads_the_config, lambda m: server(m)["args"].pop()),
    (nodes_are_told_apart, lambda m: server(m)["env"][0].update(valueFrom=None)),
    (nodes_are_told_apart, lambda m: server(m)["env"].reverse()),
    (nodes_are_told_apart, lambda m: server(m)["env"][1].update(value="localhost:9400")),
    (command_reads_the_config, lambda m: server(m)["volumeMounts"][0].update(mountPath="/x")),
    (
        command_reads_the_config,
        lambda m: pod(m)["volumes"][0]["projected"]["sources"].pop(),
    ),
    (
        others_are_kept_out,
        lambda m: one(m, "ConfigMap")["data"].update({"config.toml": "[auth]\n"}),
    ),
    (
        others_are_kept_out,
        lambda m: one(m, "ConfigMap")["data"].update(
            {"config.toml": "[auth]\nallow_anonymous = false\n"}
        ),
    ),
    (
        protocols_are_named,
        lambda m: of_kind(m, "Service")[0]["spec"]["ports"][0].pop("appProtocol"),
    ),
    (image_is_pinned, lambda m: server(m).update(image="kvstrata:latest")),
    (image_is_pinned, lambda m: server(m).update(image="kvstrata")),
    (secrets_are_kept, lambda m: of_kind(m, "Secret")[0]["metadata"]["annotations"].clear()),
    (secrets_are_kept, lambda m: server(m)["env"].append({"value": generated_secrets(m)[0]})),
]
