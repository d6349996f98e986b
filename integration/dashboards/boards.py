"""The chart's dashboards as Grafana would ask for them: panels with their queries, and "All" chosen
for the variables at their top.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus import RANGE, RATE_INTERVAL, Prometheus

LABEL_VALUES = re.compile(r"label_values\((?P<of>.*), (?P<label>\w+)\)")


@dataclass
class Panel:
    """One chart, at its place of a grid of 24 columns, with its queries by their legends."""

    title: str
    kind: str
    unit: str
    stacked: bool
    place: dict[str, int]
    queries: list[tuple[str, str]]


@dataclass
class Board:
    """A dashboard."""

    name: str
    title: str
    rows: list[tuple[str, int]]
    panels: list[Panel]


def chosen(prometheus: Prometheus, variables: list[dict[str, Any]]) -> dict[str, str]:
    """What "All" stands for in each variable, asked for in their order."""
    values = {"__rate_interval": RATE_INTERVAL, "__range": RANGE}
    for variable in variables:
        if variable["type"] != "query":
            continue
        asked = LABEL_VALUES.fullmatch(variable["query"])
        assert asked is not None, variable["query"]
        found = prometheus.ask(
            f"label/{asked['label']}/values", **{"match[]": filled(asked["of"], values)}
        )
        assert found, f"nothing to choose from: {variable['query']}"
        values[variable["name"]] = "|".join(found)
    return values


def filled(query: str, values: dict[str, str]) -> str:
    """A query with what its variables stand for."""
    made = re.sub(r"\$(\w+)", lambda variable: values[variable[1]], query)
    assert "$" not in made, made
    return made


def board(path: Path, prometheus: Prometheus) -> Board:
    """A dashboard of the chart, ready to be asked for."""
    found = json.loads(path.read_text(encoding="utf-8"))
    values = chosen(prometheus, found["templating"]["list"])
    rows, panels = [], []
    for it in found["panels"]:
        if it["type"] == "row":
            rows.append((it["title"], it["gridPos"]["y"]))
            continue
        defaults = it["fieldConfig"]["defaults"]
        stacking = defaults.get("custom", {}).get("stacking", {})
        panels.append(
            Panel(
                title=it["title"],
                kind=it["type"],
                unit=defaults["unit"],
                stacked=stacking.get("mode") == "normal",
                place=it["gridPos"],
                queries=[(t["legendFormat"], filled(t["expr"], values)) for t in it["targets"]],
            )
        )
    return Board(found["uid"], found["title"], rows, panels)


def legend(form: str, labels: dict[str, str]) -> str:
    """What Grafana writes beside a line."""
    return re.sub(r"{{(\w+)}}", lambda label: labels[label[1]], form)
