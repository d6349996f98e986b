"""Turns results.json into table.md and the charts.

python benches/peers/report.py [DIRECTORY]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chart

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "target/peers/results.json"
PHASES = {"put": "put", "get": "get", "batch": "get of 64"}
QUESTIONS = {
    "exists 1": "exists x1",
    "exists 1000": "exists x1,000",
    "exists 32768": "exists x32,768",
    "prefix 32768": "longest prefix of 32,768",
}

Row = dict[str, Any]


def share(values: list[float], part: float) -> float:
    """The value below which `part` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def block_name(size: int) -> str:
    """A block size as people write it."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def unique(rows: list[Row], key: str) -> list[Any]:
    """The values of a column, in the order in which they first appear."""
    return list(dict.fromkeys(row[key] for row in rows))


class Summary:
    """All rounds of one target in one phase."""

    def __init__(self, rows: list[Row]) -> None:
        rates = [row["bytes"] / row["seconds"] / 1e9 for row in rows]
        self.median, self.best = statistics.median(rates), max(rates)
        total = sum(row["bytes"] for row in rows) / 1e9
        self.cpu = sum(row["client_cpu"] + row["server_cpu"] for row in rows) / total
        latencies = [taken * 1e3 for row in rows for taken in row["latencies"]]
        self.p50, self.p99 = share(latencies, 0.5), share(latencies, 0.99)

    def cells(self) -> str:
        """Three cells of a table."""
        rate = f"{self.median:.2f} ({self.best:.2f})"
        return f"{rate} | {self.cpu:.2f} | {self.p50:.2f} / {self.p99:.2f}"


def summaries(rows: list[Row], size: int, clients: int) -> dict[str, dict[str, Summary]]:
    """By target and phase."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if (row["size"], row["clients"]) == (size, clients):
            found.setdefault(row["target"], {}).setdefault(row["phase"], []).append(row)
    return {
        target: {kind: Summary(group) for kind, group in phases.items()}
        for target, phases in found.items()
        if len(phases) == len(PHASES)
    }


def transfers(results: Row, names: list[str]) -> Iterator[str]:
    """A table for each block size and number of clients."""
    rows = results["rows"]
    for size in unique(rows, "size"):
        for clients in unique(rows, "clients"):
            who = "one client" if clients == 1 else f"{clients} clients"
            yield f"\n**{block_name(size)}, {who}**\n"
            heads = [f"{name}, GB/s | CPU s/GB | p50 / p99, ms" for name in PHASES.values()]
            yield f"| | {' | '.join(heads)} |"
            yield "|---" * (1 + 3 * len(PHASES)) + "|"
            table = summaries(rows, size, clients)
            for name in names:
                if name in table:
                    cells = " | ".join(table[name][kind].cells() for kind in PHASES)
                    yield f"| {name} | {cells} |"


def memory(results: Row) -> Iterator[str]:
    """Resident memory of full stores over what they still have."""
    rows = results["memory"]
    yield "\n**Memory of a store of 1 GiB that was filled past its capacity**\n"
    yield "| | blocks | still there, MiB | resident, MiB | resident over data |"
    yield "|---|---|---|---|---|"
    for row in rows:
        present, resident = row["present"] / (1 << 20), row["memory"] / (1 << 20)
        over = f"{resident / present:.2f}" if present else "-"
        size = block_name(row["size"])
        yield f"| {row['target']} | {size} | {present:,.0f} | {resident:,.0f} | {over} |"


def questions(results: Row) -> Iterator[str]:
    """How long it takes to learn what is there."""
    yield "\n**Questions for blocks that are all there, one client: p50 / p99, ms**\n"
    yield f"| | {' | '.join(QUESTIONS.values())} |"
    yield "|---" * (1 + len(QUESTIONS)) + "|"
    for target in unique(results["questions"], "target"):
        cells = []
        for question in QUESTIONS:
            taken = next(
                (
                    row["seconds"]
                    for row in results["questions"]
                    if (row["target"], row["question"]) == (target, question)
                ),
                None,
            )
            p50, p99 = (share(taken, part) * 1e3 for part in (0.5, 0.99)) if taken else (0, 0)
            cells.append(f"{p50:.3f} / {p99:.3f}" if taken else "-")
        yield f"| {target} | {' | '.join(cells)} |"


def write(results: Row, directory: Path) -> None:
    """Writes the table and a chart for each number of clients, of the largest blocks."""
    rows = results["rows"]
    names = unique(sorted(rows, key=lambda row: results["targets"].index(row["target"])), "target")
    lines = [f"{results['machine']}; load after each part {results['load']}."]
    lines += [*transfers(results, names), *memory(results), *questions(results)]
    if results["left_out"]:
        lines += ["", "**Left out**", ""]
        lines += [f"- {name}: {reason}" for name, reason in results["left_out"].items()]
    directory.joinpath("table.md").write_text("\n".join(lines) + "\n")
    size = max(unique(rows, "size"))
    for clients in unique(rows, "clients"):
        table = summaries(rows, size, clients)
        values = {
            title: {
                name: (table[name][kind].median, table[name][kind].cpu)
                for name in names
                if name in table
            }
            for kind, title in PHASES.items()
        }
        who = "one client" if clients == 1 else f"{clients} clients"
        title = f"Blocks of {block_name(size)}, {who}"
        text = chart.draw(title, ("GB/s (more is better)", "CPU s/GB (less is better)"), values)
        directory.joinpath(f"chart-{clients}.svg").write_text(text)


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text()), HERE)
