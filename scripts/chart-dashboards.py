#!/usr/bin/env python3
"""Writes the Grafana dashboards of the chart, helm/kvstrata/dashboards/*.json.

chart_panels.py has what they show; this puts it on a grid. `--check` writes nothing
and exits with 1 if a file is not what would be written. The tests hold every query to
docs/metrics.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from chart_panels import DASHBOARDS, Panel, Row

DIRECTORY = Path(__file__).resolve().parents[1] / "helm" / "kvstrata" / "dashboards"
# What every query selects by; the variables are at the top of a dashboard.
SELECT = 'namespace=~"$namespace",job=~"$job",pod=~"$pod"'
GRID_COLUMNS = 24
WIDTH, HEIGHT = 8, 8


def target(number: int, legend: str, query: str) -> dict[str, Any]:
    """One query of a panel."""
    expr = query.replace("@", SELECT)
    return {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}


def panel(number: int, x: int, y: int, it: Panel) -> dict[str, Any]:
    """One panel at its place."""
    custom: dict[str, Any] = {"fillOpacity": 30, "stacking": {"mode": "normal"}}
    defaults: dict[str, Any] = {"unit": it.unit, "min": 0}
    if it.kind == "timeseries":
        defaults["custom"] = custom if it.stacked else {"fillOpacity": 0}
    return {
        "id": number,
        "type": it.kind,
        "title": it.title,
        "description": it.about,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [target(n, *query) for n, query in enumerate(it.queries.items())],
    }


def variables() -> list[dict[str, Any]]:
    """What is chosen at the top: the source of data, and of which pods."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    chosen = [source]
    above = ""
    for name in ("namespace", "job", "pod"):
        query = f"label_values(kvstrata_build_info{{{above}}}, {name})"
        chosen.append(
            {
                "name": name,
                "type": "query",
                "datasource": {"type": "prometheus", "uid": "$datasource"},
                "query": query,
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
        )
        above += f',{name}=~"${name}"' if above else f'{name}=~"${name}"'
    return chosen


def dashboard(uid: str, title: str, rows: list[Row]) -> dict[str, Any]:
    """One dashboard, its rows below one another."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        grid = {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}
        head = {"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": grid}
        panels.append(head | {"collapsed": False, "panels": []})
        y += 1
        for number, it in enumerate(row.panels):
            x = number * WIDTH % GRID_COLUMNS
            panels.append(panel(len(panels) + 1, x, y, it))
            if x + WIDTH == GRID_COLUMNS or number + 1 == len(row.panels):
                y += HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvstrata"],
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables()},
        "panels": panels,
    }


def main() -> int:
    """Writes the files, or with --check says which differ."""
    stale = 0
    for uid, (title, rows) in DASHBOARDS.items():
        path = DIRECTORY / f"{uid}.json"
        text = json.dumps(dashboard(uid, title, rows), indent=1) + "\n"
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not what scripts/chart-dashboards.py writes", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
