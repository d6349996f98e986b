"""Checks the Helm chart and the Dockerfile without a cluster.

The chart is linted and rendered by the real Helm engine for several sets of values. Every manifest
must pass the schemas of the oldest and the newest Kubernetes we support, and the policy below. Bad
values must be refused, and the reason must name them. The policy is then turned on manifests that
break it, one rule at a time, so that a rule that stopped working is noticed.

Usage: check.py [REPOSITORY]. Prints one closing line; exits 1 if anything failed.
"""

from __future__ import annotations

import copy
import re
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

import dockerfile
import policy

Manifest = dict[str, Any]
Values = dict[str, Any]

KUBERNETES_VERSIONS = ("1.25", "1.37")
RELEASE, NAMESPACE = "kv", "cache"

GOOD_VALUES: dict[str, Values] = {
    "defaults": {},
    "large": {
        "replicas": 3,
        "resources": {
            "requests": {"cpu": 8, "memory": "256Gi"},
            "limits": {"cpu": 8, "memory": "256Gi"},
        },
        "config": {
            "server": {"drain_grace": "1m30s", "grpc_listen": "[::]:7400"},
            "memory": {"limit": "200GiB"},
            "dram": {"capacity": "180GiB"},
            "identity": {"shared_tenant": True},
            "lease": {"ttl_default": "30s", "ttl_max": "10m", "session_bytes_max": "auto"},
            "node": {"zone": "a", "advertise": "cache.example:7400"},
            "events": {
                "subscribe": "tcp://vllm-0.vllm:5557,model=org/m;tcp://vllm-1.vllm:5557,model=org/m",
                "publish": "llm-d=tcp://epp:5557,model=org/m;dynamo=tcp://*:5600,model=org/m",
                "publish_state": "none",
            },
            "nvme": {"segment_bytes": "512MiB", "daily_writes": "none", "engine": "pread"},
            "object": {"url": "s3://bucket/cache", "ttl": "1d", "admission": "all"},
        },
        "nvme": {"size": "3Ti", "storageClassName": "local-nvme", "path": "/data/kv"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "cache", "operator": "Exists"}],
        "priorityClassName": "high",
    },
    "own secret and image": {
        "identity": {"existingSecret": "mine", "key": "hex"},
        "image": {
            "repository": "images.example/kvstrata",
            "digest": "sha256:" + "0" * 64,
            "pullSecrets": [{"name": "pull"}],
        },
    },
    "own tokens, and TLS": {
        "auth": {"existingSecret": "mine", "key": "file"},
        "tls": {"secret": "from-cert-manager"},
    },
    "RESP": {
        "tls": {"secret": "certs"},
        "config": {"server": {"resp_listen": "0.0.0.0:9403"}},
    },
    "RESP in the clear": {
        "config": {"server": {"resp_listen": "0.0.0.0:6379", "resp_plain": True}},
    },
    "certificates of clients": {"tls": {"secret": "certs", "clientCertificates": True}},
    "no tokens": {"auth": {"enabled": False}},
    "the node's disk": {"nvme": {"volume": "emptyDir", "size": "7Gi"}},
    "a share of the node's disk": {
        "nvme": {"volume": "emptyDir", "size": "512Mi"},
        "config": {"nvme": {"capacity": "256MiB"}},
    },
    "no nvme": {"nvme": {"enabled": False}},
    "plain": {
        "podDisruptionBudget": {"enabled": False},
        "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
        "podAnnotations": {"a/b": "c"},
        "podLabels": {"team": "x"},
        "extraEnv": [{"name": "KV_LOG__LEVEL", "value": "debug"}],
    },
}

# Values that must be refused, and a word that the refusal must contain.
BAD_VALUES: dict[str, tuple[Values, str]] = {
    "unknown value": ({"replica": 3}, "replica"),
    "unknown section": ({"config": {"srever": {"x": 1}}}, "srever"),
    "unknown key": ({"config": {"server": {"grpc_port": 9400}}}, "grpc_port"),
    "wrong type": ({"replicas": "three"}, "replicas"),
    "no memory limit": ({"resources": {"limits": {"memory": None}}}, "memory"),
    "requests below limits": ({"resources": {"requests": {"memory": "1Gi"}}}, "requests.memory"),
    "one port twice": ({"config": {"server": {"http_listen": "0.0.0.0:9400"}}}, "9400"),
    "loopback": ({"config": {"server": {"http_listen": "127.0.0.1:9401"}}}, "http_listen"),
    "privileged port": ({"config": {"server": {"grpc_listen": "0.0.0.0:94"}}}, "grpc_listen"),
    "drain without unit": ({"config": {"server": {"drain_grace": "20"}}}, "drain_grace"),
    "secret elsewhere": ({"config": {"identity": {"secret_file": "/tmp/x"}}}, "secret_file"),
    "latest": ({"image": {"tag": "latest"}}, "tag"),
    "name twice": ({"extraEnv": [{"name": "KV_NODE__NAME", "value": "x"}]}, "KV_NODE__NAME"),
    "nvme path twice": ({"config": {"nvme": {"path": "/x"}}}, "path"),
    "nvme path by variable": (
        {"extraEnv": [{"name": "KV_NVME__PATH", "value": "x"}]},
        "KV_NVME__PATH",
    ),
    "nvme over the system": ({"nvme": {"path": "/etc/kvstrata"}}, "path"),
    "nvme nowhere": ({"nvme": {"path": "data"}}, "path"),
    "nvme of an odd size": ({"nvme": {"size": "1.5Gi"}}, "size"),
    "nvme elsewhere": ({"nvme": {"volume": "hostPath"}}, "volume"),
    "nvme settings without nvme": (
        {"nvme": {"enabled": False}, "config": {"nvme": {"engine": "pread"}}},
        "nvme.enabled",
    ),
    "class without claim": (
        {"nvme": {"volume": "emptyDir", "storageClassName": "x"}},
        "storageClassName",
    ),
    "tokens by variable": (
        {"extraEnv": [{"name": "KV_AUTH__ALLOW_ANONYMOUS", "value": "true"}]},
        "KV_AUTH__ALLOW_ANONYMOUS",
    ),
    "tokens by config": ({"config": {"auth": {"allow_anonymous": True}}}, "auth"),
    "certificates of clients without TLS": (
        {"tls": {"clientCertificates": True}},
        "tls.secret",
    ),
    "RESP in the clear without saying so": (
        {"config": {"server": {"resp_listen": "0.0.0.0:9403"}}},
        "resp_plain",
    ),
    "RESP on the port of bulk": (
        {"tls": {"secret": "x"}, "config": {"server": {"resp_listen": "0.0.0.0:9402"}}},
        "9402",
    ),
    "RESP nowhere": ({"config": {"server": {"resp_plain": True}}}, "resp_listen"),
    "engine": ({"config": {"nvme": {"engine": "steam"}}}, "engine"),
    "engine without a scheme": ({"config": {"events": {"subscribe": "h:5557"}}}, "subscribe"),
    "router of no kind": ({"config": {"events": {"publish": "tcp://epp:5557"}}}, "publish"),
    "bucket of no provider": ({"config": {"object": {"url": "ftp://host/x"}}}, "url"),
    "selector label": ({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
}


class Tally:
    """Counts facts; says at once which did not hold."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def expect(self, holds: bool, fact: str) -> None:
        """Counts one fact."""
        if holds:
            self.passed += 1
        else:
            self.failed += 1
            print(f"FAILED: {fact}")

    def expect_none(self, problems: list[str], fact: str) -> None:
        """Counts one fact that holds if `problems` is empty."""
        self.expect(not problems, f"{fact}:\n  " + "\n  ".join(problems))


def render(chart: helm_python.Chart, values: Values) -> list[Manifest]:
    """All manifests of one rendering."""
    rendered = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    manifests: list[Manifest] = []
    for path, text in rendered.items():
        if path.endswith(".yaml"):
            manifests += [document for document in yaml.safe_load_all(text) if document]
    return manifests


def refusal(action: Callable[[], object]) -> str | None:
    """The message with which Helm refuses, or None if it does not."""
    try:
        action()
    except helm_python.HelmError as error:
        return str(error)
    return None


def check_lint(tally: Tally, path: Path) -> None:
    """Lint, with warnings as errors, as the oldest and the newest supported version."""
    for version in KUBERNETES_VERSIONS:
        report = helm_python.lint(str(path), strict=True, kube_version=f"v{version}.0")
        problems = list(report["errors"])
        problems += [m["error"] for m in report["messages"] if m["severity"] >= 2]
        tally.expect_none(problems, f"lint for Kubernetes {version}")


def check_schemas(tally: Tally, manifests: list[Manifest], name: str) -> None:
    """Every manifest is valid in the oldest and the newest supported version."""
    for manifest in manifests:
        for version in KUBERNETES_VERSIONS:
            problems = []
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                problems.append(str(error).splitlines()[0])
            kind = manifest["kind"]
            tally.expect_none(problems, f"{name}: {kind} in Kubernetes {version}")


def check_policy(tally: Tally, manifests: list[Manifest], name: str) -> None:
    """Every rule of the policy holds."""
    for rule in policy.RULES:
        tally.expect_none(rule(manifests), f"{name}: {rule.__doc__}")


def expected_config(values: Values) -> Values:
    """What the configuration file should say: the values, and what the chart mounts."""
    expected: Values = copy.deepcopy(values["config"])
    nvme = values["nvme"]
    if nvme["enabled"]:
        given = expected.setdefault("nvme", {})
        given["path"] = nvme["path"]
        if nvme["volume"] == "emptyDir":
            limit = policy.binary_bytes(nvme["size"])
            given.setdefault("capacity", f"{limit * 9 // 10 // 2**20}MiB")
    expected["auth"] = (
        {"tokens_file": "/etc/kvstrata/secret/tokens"}
        if values["auth"]["enabled"]
        else {"allow_anonymous": True}
    )
    if values["tls"]["secret"]:
        tls = {"cert_file": "tls.crt", "key_file": "tls.key"}
        if values["tls"]["clientCertificates"]:
            tls["client_ca_file"] = "ca.crt"
        expected["tls"] = {key: f"/etc/kvstrata/tls/{name}" for key, name in tls.items()}
    return expected


def check_good_values(tally: Tally, chart: helm_python.Chart) -> None:
    """All good values render into good manifests."""
    for name, values in GOOD_VALUES.items():
        manifests = render(chart, values)
        check_schemas(tally, manifests, name)
        check_policy(tally, manifests, name)
        config = tomllib.loads(policy.one(manifests, "ConfigMap")["data"]["config.toml"])
        expected = expected_config(chart.merge_values(values))
        tally.expect(config == expected, f"{name}: config.toml is {config}, values say {expected}")


def check_bad_values(tally: Tally, chart: helm_python.Chart) -> None:
    """All bad values are refused by name."""
    for name, (values, word) in BAD_VALUES.items():
        said = refusal(partial(render, chart, values))
        tally.expect(said is not None, f"{name}: {values} was accepted")
        if said is not None:
            tally.expect(word in said, f"{name}: the refusal does not name {word}: {said}")


def check_rules_fire(tally: Tally, chart: helm_python.Chart) -> None:
    """Each way to break the policy is seen by the rule that is there for it."""
    good = render(chart, {})
    for rule, damage in policy.DAMAGES:
        bad = copy.deepcopy(good)
        damage(bad)
        tally.expect(
            bool(rule(bad)),
            f"rule {rule.__name__} did not see the damage of line "
            f"{damage.__code__.co_firstlineno} of policy.py",
        )
    unseen = {rule for rule in policy.RULES} - {rule for rule, _ in policy.DAMAGES}
    tally.expect_none([rule.__name__ for rule in unseen], "rules without a damage that shows them")


def check_secrets(tally: Tally, chart: helm_python.Chart) -> None:
    """Generated secrets are 32 random bytes, and secrets of one's own replace them."""

    def secret(values: Values, name: str) -> dict[str, str]:
        manifests = [
            manifest
            for manifest in render(chart, values)
            if manifest["kind"] != "Secret" or manifest["metadata"]["name"].endswith(name)
        ]
        found = policy.of_kind(manifests, "Secret")
        keys = [key for one in found for key in one["data"]]
        return dict(zip(keys, policy.generated_secrets(manifests), strict=True))

    for name, section, key in [("-identity", "identity", "identity"), ("-tokens", "auth", "token")]:
        first, second = secret({}, name), secret({}, name)
        made = bool(re.fullmatch("[0-9a-f]{64}", first[key]))
        tally.expect(made, f"{section}: the secret is 64 hex digits")
        tally.expect(first[key] != second[key], f"{section}: the secret is random")
        own = secret({section: {"existingSecret": "mine"}}, name)
        tally.expect(not own, f"{section}: existingSecret is used")
    tokens = secret({}, "-tokens")
    lines = [line.split() for line in tokens["tokens"].splitlines() if not line.startswith("#")]
    expected = [["default", tokens["token"], "operator"]]
    tally.expect(lines == expected, "the file of tokens has the one token")
    tally.expect(not secret({"auth": {"enabled": False}}, "-tokens"), "no tokens, no Secret")


def check_versions(tally: Tally, chart: helm_python.Chart, repository: Path) -> None:
    """A change of the configuration restarts pods; versions agree."""

    def checksum(values: Values) -> str:
        workload = policy.one(render(chart, values), "StatefulSet")
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    tally.expect(checksum({}) == checksum({"replicas": 2}), "checksum/config depends on the config")
    changed = checksum({"config": {"log": {"level": "debug"}}})
    tally.expect(checksum({}) != changed, "checksum/config follows the config")
    cargo = tomllib.loads((repository / "Cargo.toml").read_text(encoding="utf-8"))
    version = cargo["workspace"]["package"]["version"]
    tally.expect(chart.metadata["appVersion"] == version, "appVersion is the version in Cargo.toml")


def check_dockerfile(tally: Tally, repository: Path) -> None:
    """The Dockerfile keeps its rules, and each rule sees what it is there for."""
    good = (repository / "Dockerfile").read_text(encoding="utf-8")
    for rule in dockerfile.RULES:
        tally.expect_none(rule(good), f"Dockerfile: {rule.__doc__}")
    for rule, old, new in dockerfile.DAMAGES:
        tally.expect(old in good, f"Dockerfile has no {old!r} to damage")
        tally.expect(bool(rule(good.replace(old, new))), f"{rule.__name__} did not see {new!r}")


def main() -> int:
    """Runs all checks."""
    default = Path(__file__).resolve().parents[2]
    repository = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    path = repository / "helm" / "kvstrata"
    tally = Tally()
    check_lint(tally, path)
    with helm_python.Chart.load(str(path)) as chart:
        check_good_values(tally, chart)
        check_bad_values(tally, chart)
        check_rules_fire(tally, chart)
        check_secrets(tally, chart)
        check_versions(tally, chart, repository)
    check_dockerfile(tally, repository)
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
