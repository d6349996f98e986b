"""Whole renderings of the chart, kept as files, so that a change of a template is seen in a diff.

Each file of values in helm/kvstrata/ci has its rendering in integration/chart/golden. What is
random is replaced by a word; dashboards, which are files of their own, are named only.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import helm_python
import yaml

RELEASE, NAMESPACE = "kv", "cache"
SECRET_VALUE = re.compile(r'^(  [\w.-]+: )"[A-Za-z0-9+/=]{64,}"$', re.MULTILINE)
DIFF_LINES_MAX = 60


def files(repository: Path) -> list[Path]:
    """The files of values."""
    return sorted((repository / "helm" / "kvstrata" / "ci").glob("*-values.yaml"))


def rendered(chart: helm_python.Chart, values: Path) -> str:
    """One rendering as text, templates in order."""
    given = yaml.safe_load(values.read_text(encoding="utf-8")) or {}
    texts = []
    for path, text in sorted(chart.render(given, name=RELEASE, namespace=NAMESPACE).items()):
        if not text.strip():
            continue
        if path.endswith("dashboards.yaml"):
            text = re.sub(
                r"^  ([\w-]+\.json): .*?(?=^  [\w-]+\.json|\Z)",
                r"  \1: ...\n",
                text,
                flags=re.M | re.S,
            )
        text = SECRET_VALUE.sub(r"\1RANDOM", text)
        texts.append(f"#### {path.removeprefix('kvstrata/')}\n{text.strip()}\n")
    return "\n".join(texts)


def kept_at(repository: Path, values: Path) -> Path:
    """Where the rendering of a file of values is kept."""
    directory = repository / "integration" / "chart" / "golden"
    return directory / (values.name.removesuffix("-values.yaml") + ".txt")


def difference(repository: Path, chart: helm_python.Chart, values: Path) -> list[str]:
    """How a rendering differs from the one that is kept."""
    path = kept_at(repository, values)
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    now = rendered(chart, values)
    lines = difflib.unified_diff(
        kept.splitlines(), now.splitlines(), "kept", "rendered", lineterm="", n=1
    )
    return list(lines)[:DIFF_LINES_MAX]


def rewrite(repository: Path, chart: helm_python.Chart) -> int:
    """Keeps the renderings as they are now; returns how many changed."""
    changed = 0
    for values in files(repository):
        path = kept_at(repository, values)
        if difference(repository, chart, values):
            path.parent.mkdir(exist_ok=True)
            path.write_text(rendered(chart, values), encoding="utf-8")
            changed += 1
    return changed
