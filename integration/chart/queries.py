"""Holds the queries of alerts and dashboards to docs/metrics.md, which a test holds to a running
server.

Each must be PromQL, and name only series that there are, by labels and values that they have. A
panel must have the unit of what it shows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

SUFFIXES = {
    "counter": {"_total"},
    "gauge": {""},
    "histogram": {"_bucket", "_sum", "_count"},
    "info": {"_info"},
}
# What Prometheus and the operator add to every series.
ADDED_LABELS = {"job", "namespace", "pod", "service", "instance", "le"}
# What a variable of Grafana stands for, where PromQL wants a duration.
DURATIONS = {"$__rate_interval": "5m", "$__range": "6h"}
SERIES = re.compile(r"\bkvstrata_[a-z_]+\b")
SELECTOR = re.compile(r"\b(kvstrata_[a-z_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|without) \(([^)]*)\)")


@dataclass(frozen=True)
class Family:
    """One row of docs/metrics.md; the values of a label are empty if they are not listed there."""

    name: str
    kind: str
    labels: dict[str, set[str]]


def labels_of(cell: str) -> dict[str, set[str]]:
    """Reads the column of labels: `op, outcome: ok, failed; tier`."""
    found: dict[str, set[str]] = {}
    for part in filter(None, (p.strip() for p in re.sub(r"\([^)]*\)", "", cell).split(";"))):
        names, _, values = part.partition(":")
        listed = {value.strip() for value in values.split(",") if value.strip()}
        *others, last = (name.strip() for name in names.split(","))
        found |= {name: set() for name in others}
        found[last] = listed
    return found


def families(repository: Path) -> dict[str, Family]:
    """Every series that there is, with the family that it is of."""
    page = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(kvstrata_\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE)
    return {
        name + suffix: Family(name, kind, labels_of(cell))
        for name, kind, cell in rows
        for suffix in SUFFIXES[kind]
    }


def problems_of(query: str, known: dict[str, Family]) -> list[str]:
    """What is wrong with a query."""
    plain = query
    for variable, duration in DURATIONS.items():
        plain = plain.replace(variable, duration)
    try:
        promql_parser.parse(plain)
    except ValueError as error:
        return [f"not PromQL: {error}"]
    used = set(SERIES.findall(query))
    problems = [f"{name} is no series of docs/metrics.md" for name in sorted(used - set(known))]
    if problems:
        return problems
    for name, matchers in SELECTOR.findall(query):
        labels = known[name].labels
        for label, operator, value in MATCHER.findall(matchers):
            if label in ADDED_LABELS:
                continue
            if label not in labels:
                problems.append(f"{name} has no label {label}")
            elif labels[label] and operator in ("=", "=~"):
                wrong = set(value.split("|")) - labels[label]
                problems += [f"{label} of {name} is never {w}" for w in sorted(wrong)]
    every = ADDED_LABELS | {label for name in used for label in known[name].labels}
    for group in GROUPING.findall(query):
        problems += [
            f"no {g.strip()} to group by" for g in group.split(",") if g.strip() not in every
        ]
    return problems


def units_for(query: str, known: dict[str, Family]) -> set[str]:
    """The units in which a panel may show a query."""
    if " / " in query:
        return {"percentunit"}
    names = {known[name].name for name in SERIES.findall(query) if name in known}
    growing = "rate(" in query
    endings = {name.rpartition("_")[2] for name in names}
    if all(name.endswith("_bytes_per_second") for name in names):
        return {"Bps"}
    if endings == {"bytes"}:
        return {"Bps"} if growing else {"bytes"}
    if endings == {"seconds"}:
        return {"s"}
    if endings == {"ratio"}:
        return {"short"}
    if endings == {"dollars"}:
        return {"currencyUSD"}
    return {"ops", "reqps"} if growing else {"short"}


def alerts(rule: dict[str, Any], known: dict[str, Family], job: str) -> list[str]:
    """What is wrong with alerts: their queries, their texts, whom they are about."""
    problems = []
    names: list[str] = []
    for alert in (a for group in rule["spec"]["groups"] for a in group["rules"]):
        name, query = alert["alert"], alert["expr"]
        names.append(name)
        problems += [f"{name}: {p}" for p in problems_of(query, known)]
        series = len(re.findall(r"\b(?:up|kvstrata_[a-z_]+)\b", query.replace(job, "")))
        if query.count(f'job="{job}"') != series:
            problems.append(f"{name} is not about this release alone")
        if alert["labels"]["severity"] not in ("critical", "warning"):
            problems.append(f"{name}: severity {alert['labels']['severity']}")
        if set(alert["annotations"]) != {"summary", "description"}:
            problems.append(f"{name}: annotations {set(alert['annotations'])}")
        kept = {g.strip() for group in GROUPING.findall(query) for g in group.split(",")}
        if not kept:
            used = [known[n] for n in SERIES.findall(query) if n in known]
            kept = ADDED_LABELS.union(*(family.labels for family in used))
        told = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
        problems += [f"{name} tells {t}, which its query has not" for t in told - kept]
    return problems + [f"{n} is there twice" for n in set(names) if names.count(n) > 1]


def dashboard(text: str, known: dict[str, Family]) -> list[str]:
    """What is wrong with a dashboard: its queries, its units, its grid."""
    found = json.loads(text)
    problems = []
    variables = {v["name"] for v in found["templating"]["list"]}
    panels = [p for p in found["panels"] if p["type"] != "row"]
    if len({p["id"] for p in found["panels"]}) != len(found["panels"]):
        problems.append("two panels have one id")
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found["panels"]]
    if len(set(places)) != len(places):
        problems.append("two panels are at one place")
    for panel in panels:
        title, unit = panel["title"], panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            query = target["expr"]
            problems += [f"{title}: {p}" for p in problems_of(query, known)]
            if unit not in units_for(query, known):
                problems.append(f"{title}: unit {unit}, but {units_for(query, known)} is asked for")
            used = set(re.findall(r'"\$(\w+)"', query))
            problems += [f"{title}: no variable {v}" for v in used - variables]
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {g.strip() for group in GROUPING.findall(query) for g in group.split(",")}
            problems += [f"{title}: no {s} to show" for s in shown - kept]
    return problems


def load_alerts(path: Path, job: str) -> dict[str, Any]:
    """The alerts as the chart makes them for a job, to be damaged."""
    text = path.read_text(encoding="utf-8").replace("RELEASE", f'job="{job}",namespace="x"')
    return {"spec": yaml.safe_load(text)}


# (what an alert or panel says, what a bad one would say, a word of the complaint)
DAMAGES: list[tuple[str, str, str]] = [
    ("sum by (pod, tier) (increase(", "sum by (pod, tier) increase((", "not PromQL"),
    ("kvstrata_corrupt_blocks_total", "kvstrata_corrupt_blocks", "no series"),
    ('answer="miss"', 'answer="missing"', "is never missing"),
    ('reason="expired"', 'cause="expired"', "no label cause"),
    ("sum by (pod, op)", "sum by (pod, opp)", "no opp to group by"),
    ("$labels.tier", "$labels.colour", "which its query has not"),
    ("up{RELEASE}", "up", "not about this release alone"),
]
