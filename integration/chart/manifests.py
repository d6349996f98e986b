"""Finds things in the manifests of one rendering of the chart."""

from __future__ import annotations

import base64
import re
import tomllib
from typing import Any

Manifest = dict[str, Any]

UNITS_BYTES = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
UNITS_SECONDS = {"h": 3600, "m": 60, "s": 1}
WORKLOADS = ("StatefulSet", "DaemonSet")


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """The manifests of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of one kind."""
    (found,) = of_kind(manifests, kind)
    return found


def named(manifests: list[Manifest], kind: str, suffix: str) -> Manifest:
    """The manifest of one kind whose name ends so."""
    (found,) = (m for m in of_kind(manifests, kind) if m["metadata"]["name"].endswith(suffix))
    return found


def workload(manifests: list[Manifest]) -> Manifest:
    """What starts the nodes: a StatefulSet, or for agents a DaemonSet."""
    (found,) = (m for m in manifests if m["kind"] in WORKLOADS)
    return found


def is_agent(manifests: list[Manifest]) -> bool:
    """Whether the nodes are agents."""
    return workload(manifests)["kind"] == "DaemonSet"


def template(manifests: list[Manifest]) -> Manifest:
    """The template of the nodes' pods."""
    found: Manifest = workload(manifests)["spec"]["template"]
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    """The spec of the nodes' pods."""
    found: Manifest = template(manifests)["spec"]
    return found


def server(manifests: list[Manifest]) -> Manifest:
    """The only container of a node."""
    (container,) = pod(manifests)["containers"]
    found: Manifest = container
    return found


def test_pod(manifests: list[Manifest]) -> Manifest:
    """The spec of the pod that `helm test` starts."""
    found: Manifest = one(manifests, "Pod")["spec"]
    return found


def claim(manifests: list[Manifest]) -> Manifest:
    """The only claim of the pods."""
    (claimed,) = workload(manifests)["spec"]["volumeClaimTemplates"]
    found: Manifest = claimed
    return found


def config(manifests: list[Manifest]) -> dict[str, Any]:
    """The configuration file, read as the server reads it."""
    (file,) = (m for m in of_kind(manifests, "ConfigMap") if "config.toml" in m["data"])
    return tomllib.loads(file["data"]["config.toml"])


def environment(container: Manifest) -> dict[str, Any]:
    """The variables of a container: what each is, or where it comes from."""
    return {e["name"]: e.get("valueFrom", e.get("value")) for e in container["env"]}


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
