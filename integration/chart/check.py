"""Checks the Helm chart and the Dockerfile without a cluster.

The chart is linted and rendered by the real Helm engine for several sets of values. Every manifest
must pass the schemas of three Kubernetes versions, and the policy in policy.py and extras.py; five
renderings are kept as files, and must be the same. Bad values must be refused, and the reason must
name them. Alerts and dashboards may ask only for what docs/metrics.md has. The policy is then
turned on manifests that break it, one rule at a time, so that a rule that stopped working is
noticed.

Usage: check.py [--rewrite] [REPOSITORY]. Prints one closing line; exits 1 if anything failed. With
--rewrite it keeps the renderings as they are now.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

import cluster
import damages
import dockerfile
import extras
import golden
import manifests as find
import policy
import queries
import standards
import values as sets
from golden import NAMESPACE, RELEASE
from manifests import Manifest
from values import Values

KUBERNETES_VERSIONS = ("1.25", "1.31", "1.37")
# Kinds of the Prometheus operator and of cert-manager: no schema of theirs is at hand.
OTHERS = {"Certificate", "ServiceMonitor", "PrometheusRule"}
RULES = [*policy.RULES, *extras.RULES, *cluster.RULES]
WRITERS = ("scripts/chart-readme.py", "scripts/chart-dashboards.py")


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
    found: list[Manifest] = []
    for path, text in rendered.items():
        if path.endswith(".yaml"):
            found += [document for document in yaml.safe_load_all(text) if document]
    return found


def refusal(action: Callable[[], object]) -> str | None:
    """The message with which Helm refuses, or None if it does not."""
    try:
        action()
    except helm_python.HelmError as error:
        return str(error)
    return None


def check_lint(tally: Tally, path: Path) -> None:
    """Lint, with warnings as errors, for each supported version and mode."""
    for version in KUBERNETES_VERSIONS:
        for name in ("defaults", "everything", "agents"):
            report = helm_python.lint(
                str(path), sets.GOOD[name], strict=True, kube_version=f"v{version}.0"
            )
            problems = list(report["errors"])
            problems += [m["error"] for m in report["messages"] if m["severity"] >= 2]
            tally.expect_none(problems, f"lint of {name} for Kubernetes {version}")
    # Older ones have no schemas at hand, but fields that they do not know are left out.
    old = helm_python.lint(str(path), strict=True, kube_version="v1.20.0")
    tally.expect(not old["errors"], f"lint for Kubernetes 1.20: {old['errors']}")


def check_schemas(tally: Tally, found: list[Manifest], name: str) -> None:
    """Every manifest is valid in all supported versions."""
    for manifest in found:
        kind = manifest["kind"]
        if kind in OTHERS:
            continue
        for version in KUBERNETES_VERSIONS:
            problems = []
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                problems.append(str(error).splitlines()[0])
            tally.expect_none(problems, f"{name}: {kind} in Kubernetes {version}")


def expected_config(values: Values) -> Values:
    """What the configuration file should say: the values, and what the chart mounts."""
    expected: Values = copy.deepcopy(values["config"])
    nvme, tls = values["nvme"], values["tls"]
    if nvme["enabled"]:
        given = expected.setdefault("nvme", {})
        given["path"] = nvme["path"]
        if nvme["volume"] == "emptyDir":
            limit = find.binary_bytes(nvme["size"])
            given.setdefault("capacity", f"{limit * 9 // 10 // 2**20}MiB")
    expected["server"]["admin_listen"] = "unix:/run/kvstrata-admin/admin.sock"
    enabled = values["cluster"]["enabled"]
    is_cluster = enabled is True or (enabled == "auto" and values["mode"] != "agent")
    if not is_cluster:
        expected["cluster"] = {k: v for k, v in expected["cluster"].items() if k == "name"}
    expected = {section: keys for section, keys in expected.items() if keys}
    if values["mode"] == "agent":
        socket = f"{values['agent']['socketDirectory']}/bulk.sock"
        expected["server"] = {"shared_memory": True} | expected["server"] | {"bulk_unix": socket}
    expected["auth"] = (
        {"tokens_file": "/etc/kvstrata/secret/tokens"}
        if values["auth"]["enabled"]
        else {"allow_anonymous": True}
    )
    if tls["secret"] or tls["certManager"]["enabled"]:
        files = {"cert_file": "tls.crt", "key_file": "tls.key"}
        if tls["clientCertificates"]:
            files["client_ca_file"] = "ca.crt"
        if tls["ca"] and is_cluster:
            files["peer_ca_file"] = "ca.crt"
        expected["tls"] = {key: f"/etc/kvstrata/tls/{name}" for key, name in files.items()}
    return expected


def check_good_values(tally: Tally, chart: helm_python.Chart) -> None:
    """All good values render into good manifests."""
    for name, values in sets.GOOD.items():
        found = render(chart, values)
        check_schemas(tally, found, name)
        for rule in RULES:
            tally.expect_none(rule(found), f"{name}: {rule.__doc__}")
        config, expected = find.config(found), expected_config(chart.merge_values(values))
        tally.expect(config == expected, f"{name}: config.toml is {config}, values say {expected}")
        has_test = bool(find.of_kind(found, "Pod"))
        wanted = name not in ("own tokens, and TLS", "certificates of clients", "plain")
        tally.expect(has_test == wanted, f"{name}: a test: {has_test}")


def check_bad_values(tally: Tally, chart: helm_python.Chart) -> None:
    """All bad values are refused by name."""
    for name, (values, word) in sets.BAD.items():
        said = refusal(partial(render, chart, values))
        tally.expect(said is not None, f"{name}: {values} was accepted")
        if said is not None:
            tally.expect(word in said, f"{name}: the refusal does not name {word}: {said}")


def check_rules_fire(tally: Tally, chart: helm_python.Chart) -> None:
    """Each way to break the policy is seen by the rule that is there for it."""
    bases: list[tuple[Values, list[tuple[policy.Rule, damages.Damage]]]] = [
        ({}, damages.DAMAGES),
        (sets.FULL, damages.FULL_DAMAGES),
        (sets.AGENT, damages.AGENT_DAMAGES),
    ]
    broken = set()
    for values, ways in bases:
        good = render(chart, values)
        for rule, damage in ways:
            bad = copy.deepcopy(good)
            damage(bad)
            broken.add(rule)
            line = damage.__code__.co_firstlineno
            fact = f"rule {rule.__name__} did not see the damage of line {line} of damages.py"
            tally.expect(bool(rule(bad)), fact)
    unseen = [rule.__name__ for rule in RULES if rule not in broken]
    tally.expect_none(unseen, "rules without a damage that shows them")


def check_standards(tally: Tally, chart: helm_python.Chart) -> None:
    """Nodes violate no control of "restricted", each sees what it is there for, and agents
    violate what is documented."""
    good = find.template(render(chart, {}))
    tally.expect(
        not standards.violations(good["metadata"], good["spec"]), "defaults are restricted"
    )
    broken = set()
    for control, damage in damages.STANDARD_DAMAGES:
        bad = copy.deepcopy(good)
        damage(bad["metadata"], bad["spec"])
        found = set(standards.violations(bad["metadata"], bad["spec"]))
        tally.expect(found == {control.__name__}, f"{control.__name__} was violated, not {found}")
        broken.add(control)
    unseen = [control.__name__ for control in standards.CONTROLS if control not in broken]
    tally.expect_none(unseen, "controls without a damage that shows them")
    agent = find.template(render(chart, sets.AGENT))
    found = set(standards.violations(agent["metadata"], agent["spec"]))
    tally.expect(found == policy.AGENT_VIOLATIONS, f"agents violate {found}")


def check_secrets(tally: Tally, chart: helm_python.Chart) -> None:
    """Generated secrets are 32 random bytes, and secrets of one's own replace them."""

    def secret(values: Values, name: str) -> dict[str, str]:
        found = [
            manifest
            for manifest in find.of_kind(render(chart, values), "Secret")
            if manifest["metadata"]["name"].endswith(name)
        ]
        keys = [key for one in found for key in one["data"]]
        return dict(zip(keys, find.generated_secrets(found), strict=True))

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
        annotations = find.template(render(chart, values))["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    tally.expect(checksum({}) == checksum({"replicas": 2}), "checksum/config depends on the config")
    changed = checksum({"config": {"log": {"level": "debug"}}})
    tally.expect(checksum({}) != changed, "checksum/config follows the config")
    cargo = tomllib.loads((repository / "Cargo.toml").read_text(encoding="utf-8"))
    version = cargo["workspace"]["package"]["version"]
    tally.expect(chart.metadata["appVersion"] == version, "appVersion is the version in Cargo.toml")


def check_golden(tally: Tally, chart: helm_python.Chart, repository: Path) -> None:
    """The renderings that are kept are those of now."""
    files = golden.files(repository)
    tally.expect(len(files) >= 5, f"{len(files)} renderings are kept")
    for values in files:
        differs = golden.difference(repository, chart, values)
        fact = f"{values.name} renders otherwise than it did (check.py --rewrite keeps that)"
        tally.expect_none(differs, fact)


def check_queries(tally: Tally, chart: helm_python.Chart, repository: Path) -> None:
    """Alerts and dashboards ask for what there is; what is wrong with one is seen."""
    known = queries.families(repository)
    full = render(chart, sets.FULL)
    job = find.named(full, "Service", "-headless")["metadata"]["name"]
    tally.expect_none(queries.alerts(find.one(full, "PrometheusRule"), known, job), "alerts")
    boards = find.named(full, "ConfigMap", "-dashboards")["data"]
    for name, text in boards.items():
        tally.expect_none(queries.dashboard(text, known), name)
    source = (repository / "helm" / "kvstrata" / "alerts.yaml").read_text(encoding="utf-8")
    for old, new, word in queries.DAMAGES:
        bad = yaml.safe_load(source.replace(old, new).replace("RELEASE", f'job="{job}"'))
        said = queries.alerts({"spec": bad}, known, job)
        tally.expect(any(word in s for s in said), f"{new!r} in alerts.yaml: only {said}")
    for old, new, word in [
        ('"unit": "Bps"', '"unit": "bytes"', "unit bytes"),
        ("{{tier}}", "{{colour}}", "no colour to show"),
        ("$pod", "$pods", "no variable pods"),
    ]:
        said = queries.dashboard(boards["kvstrata.json"].replace(old, new), known)
        tally.expect(any(word in s for s in said), f"{new!r} in a dashboard: only {said}")


def settings(text: str) -> list[Values]:
    """The JSON that is pasted into engines, outermost objects in order."""
    return [json.loads(found) for found in re.findall(r"'(\{\n.*?\})'", text, re.DOTALL)]


def check_notes(tally: Tally, chart: helm_python.Chart, repository: Path) -> None:
    """What the notes give to paste parses, and is what docs/engines give, but for the address."""

    def notes(values: Values) -> str:
        rendered = chart.render(values, name=RELEASE, namespace=NAMESPACE)
        return next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))

    found = settings(notes({}))
    address = f"{RELEASE}-kvstrata.{NAMESPACE}.svc:9400"
    for given, engine in zip(found, ("vllm", "sglang", "lmcache"), strict=True):
        page = (repository / "docs" / "engines" / f"{engine}.md").read_text(encoding="utf-8")
        page = page.replace("127.0.0.1:9400", address).replace('"bf16"', '"LABEL"')
        documented = settings(page)[0]
        tally.expect(given == documented, f"{engine}: notes have {given}, docs have {documented}")
    for name, values in sets.GOOD.items():
        text = notes(values)
        tally.expect("%!" not in text and "<no value>" not in text, f"{name}: notes: {text}")
        tally.expect(len(settings(text)) == 3, f"{name}: notes have {len(settings(text))} settings")


def check_written(tally: Tally, repository: Path) -> None:
    """What scripts write is what they would write now."""
    for script in WRITERS:
        command = [sys.executable, str(repository / script), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        tally.expect(done.returncode == 0, f"{script} --check: {done.stderr.strip()}")


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
    arguments: list[Any] = [a for a in sys.argv[1:] if a != "--rewrite"]
    default = Path(__file__).resolve().parents[2]
    repository = Path(arguments[0]) if arguments else default
    path = repository / "helm" / "kvstrata"
    tally = Tally()
    with helm_python.Chart.load(str(path)) as chart:
        if "--rewrite" in sys.argv:
            print(f"{golden.rewrite(repository, chart)} renderings changed")
            return 0
        check_lint(tally, path)
        check_good_values(tally, chart)
        check_bad_values(tally, chart)
        check_rules_fire(tally, chart)
        check_standards(tally, chart)
        check_secrets(tally, chart)
        check_versions(tally, chart, repository)
        check_golden(tally, chart, repository)
        check_queries(tally, chart, repository)
        check_notes(tally, chart, repository)
    check_written(tally, repository)
    check_dockerfile(tally, repository)
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
