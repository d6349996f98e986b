#!/usr/bin/env python3
"""Writes the tables of values in helm/kvstrata/README.md, from the comments of values.yaml.

The text between the marks is replaced: a table for each section, a row for each value with its
default and the comment above it. `--check` writes nothing and exits with 1 if that would change the
file.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

CHART = Path(__file__).resolve().parents[1] / "helm" / "kvstrata"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
LINE = re.compile(r"^( *)([A-Za-z_][\w./-]*):(?: +(.*))?$")


@dataclass
class Value:
    """One line of values.yaml: its path, its default if it is no section, what is said of it."""

    path: str
    default: str | None
    about: str


def values(text: str) -> list[Value]:
    """Reads names, defaults and comments, in the order of the file."""
    found: list[Value] = []
    comment: list[str] = []
    parents: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped:
            comment = []
        elif stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif match := LINE.match(line):
            indent, name, default = match.groups()
            parents = [*parents[: len(indent) // 2], name]
            found.append(Value(".".join(parents), default, " ".join(comment)))
            comment = []
        elif stripped.startswith("- "):
            # A list that is a default stands below its name.
            found[-1].default = f"[{stripped.removeprefix('- ')}]"
        else:
            raise ValueError(f"values.yaml: cannot read {line!r}")
    return found


def tables(found: list[Value]) -> str:
    """The tables: one for what has no section, then one a section."""
    general = [v for v in found if "." not in v.path and v.default is not None]
    lines = table(general)
    for section in (v for v in found if "." not in v.path and v.default is None):
        inside = [v for v in found if v.path.startswith(section.path + ".")]
        lines += ["", f"### {section.path}", ""]
        if section.about:
            lines += [section.about, ""]
        lines += table(inside)
    return "\n".join(lines) + "\n"


def table(rows: list[Value]) -> list[str]:
    """One table; a section within a section has a row without a default."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for row in rows:
        default = f"`{row.default}`" if row.default is not None else ""
        if default or row.about:
            lines.append(f"| `{row.path}` | {default} | {row.about.replace('|', chr(92) + '|')} |")
    return lines


def main() -> int:
    """Writes the file, or with --check says that it is stale."""
    path = CHART / "README.md"
    old = path.read_text(encoding="utf-8")
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = tables(values((CHART / "values.yaml").read_text(encoding="utf-8")))
    new = f"{head}{BEGIN}\n\n{made}\n{END}{tail}"
    if "--check" not in sys.argv:
        path.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{path.name} is not what scripts/chart-readme.py writes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
