"""What the chart's dashboards and alerts ask for, asked of a real Prometheus that scrapes three
nodes under load: every panel shows something, no alert fires while all is well, and some do when it
is not.
"""

from __future__ import annotations

import math
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from boards import Board, Panel, board, legend
from conftest import ALERTS, DASHBOARDS, Watched
from prometheus import rules, until
from signs import signs_file

PAGE_BYTES = 64 << 10
SHOWN_SECONDS, STEP_SECONDS = 20.0, 1.0
# What stays at nothing in a cluster that is well, or that nobody uses in this way.
NOTHING_WRONG = "there is no damage, no failure and no refusal"
NO_CLIENT = "no client of this kind is here"
MAY_BE_ZERO = {
    "Reads that brought nothing": NOTHING_WRONG,
    "Damage": NOTHING_WRONG,
    "Clients refused": NOTHING_WRONG,
    "Tiers that are not well": NOTHING_WRONG,
    "Not copied": NOTHING_WRONG,
    "Failures of the disk": NOTHING_WRONG,
    "Not sent, and sent again": NOTHING_WRONG,
    "Waiting for nvme": "the cleaner keeps up",
    "Queued for loading": "it is seldom scraped in the middle of a load",
    "Batches": NO_CLIENT,
    "Blocks": NO_CLIENT,
    "Engines": NO_CLIENT,
    "Index of other hash schemes": NO_CLIENT,
    "Blocks without a name in a scheme": NO_CLIENT,
    "Descriptions on nvme": NO_CLIENT,
    "Blocks in events": NO_CLIENT,
    "Announced now": NO_CLIENT,
    "Announced again, and cut off": NO_CLIENT,
}
# Whoever builds beside the tests makes a disk four times slower than usual.
BUSY_MACHINE = {"KvstrataTierDegraded"}


@pytest.fixture(scope="module")
def boards(watched: Watched) -> list[Board]:
    """Both dashboards, once there is something to see."""
    load, prometheus = watched.load, watched.prometheus
    until(lambda: load.rounds >= 4 or load.problems, "four rounds of load", seconds=120)
    until(
        lambda: (
            prometheus.number("sum(kvstrata_object_named_packs_total)") > 0
            and prometheus.number('sum(rate(kvstrata_get_bytes_total{tier="object"}[1m]))') > 0
        ),
        "reads from every tier",
    )
    return [board(path, prometheus) for path in sorted(DASHBOARDS.glob("*.json"))]


def largest(watched: Watched, panel: Panel) -> float:
    """The largest value of a panel, each of whose queries must give series with their legends."""
    values = [0.0]
    for form, query in panel.queries:
        series = watched.prometheus.series(query, SHOWN_SECONDS, STEP_SECONDS)
        assert series, f"{panel.title}: nothing comes of {query}"
        for one in series:
            assert legend(form, one["metric"])
            values += [float(value) for _, value in one["values"]]
    return max(value for value in values if not math.isnan(value))


def test_every_panel_shows_what_is_there(watched: Watched, boards: list[Board]) -> None:
    assert len(boards) == 2 and sum(len(board.panels) for board in boards) > 30
    empty = {
        panel.title for board in boards for panel in board.panels if largest(watched, panel) == 0.0
    }
    assert empty <= set(MAY_BE_ZERO), f"nothing but zeros: {sorted(empty - set(MAY_BE_ZERO))}"
    titles = {panel.title for board in boards for panel in board.panels}
    assert set(MAY_BE_ZERO) <= titles, "a panel that is excused is no more"


def test_every_byte_of_the_load_was_right(watched: Watched, boards: list[Board]) -> None:
    assert watched.load.problems == []


def test_no_alert_fires_while_all_is_well(watched: Watched, boards: list[Board]) -> None:
    found = watched.prometheus.alerts()
    assert set(found) == {
        rule["alert"] for group in rules(ALERTS)["groups"] for rule in group["rules"]
    }
    for name, alert in found.items():
        assert alert["health"] == "ok", f"{name}: {alert.get('lastError')}"
    fired = watched.prometheus.series('ALERTS{alertstate="firing"}', 600, STEP_SECONDS)
    names = {one["metric"]["alertname"] for one in fired} - BUSY_MACHINE
    assert not names, fired


def test_prometheus_takes_the_rules_and_each_fires_when_it_should(tmp_path: Path) -> None:
    """By the time that each waits, on series that are made for it: promtool's own tests."""
    found = rules(ALERTS)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(found))
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(signs_file(found)))
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def fires(watched: Watched, name: str, pod: str) -> None:
    """Waits until an alert fires for a node, and for no other one."""

    def fired() -> bool:
        alerts = watched.prometheus.alerts()[name]["alerts"]
        assert {alert["labels"]["pod"] for alert in alerts} <= {pod}, alerts
        return any(alert["state"] == "firing" for alert in alerts)

    until(fired, f"{name} of {pod}")


def damage(directory: Path) -> None:
    """Writes over some bytes of every page of a tier's segments; some may leave meanwhile."""
    segments = list(directory.glob("*.seg"))
    assert segments
    for path in segments:
        with suppress(FileNotFoundError), path.open("r+b") as file:
            for at in range(PAGE_BYTES // 2, path.stat().st_size, PAGE_BYTES):
                file.seek(at)
                file.write(b"damaged!")


def test_alerts_fire_when_something_is_wrong(watched: Watched, boards: list[Board]) -> None:
    _, second, last = watched.nodes

    damage(watched.home / "kvstrata-1" / "kvstrata-nvme" / "segments")
    fires(watched, "KvstrataCorruptBlocks", "kvstrata-1")
    assert watched.load.problems == [], "what was damaged is a miss, and no byte is wrong"
    watched.load.over.set()

    watched.tenants.write_text("broken")
    until(
        lambda: watched.prometheus.alerts()["KvstrataReloadFailed"]["state"] == "firing",
        "KvstrataReloadFailed",
    )

    last.kill()
    fires(watched, "KvstrataNodeDown", "kvstrata-2")
    assert second.metric("kvstrata_corrupt_blocks_total") > 0
