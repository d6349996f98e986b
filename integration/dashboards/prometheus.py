"""A real Prometheus that scrapes the nodes of a test as the chart's ServiceMonitor has it done, and
evaluates the chart's alerts.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

Found = TypeVar("Found")

JOB, NAMESPACE = "kvstrata-headless", "cache"
SCRAPE_SECONDS = 1
# What Grafana makes of such a scrape interval is four times as long; more is steadier.
RATE_INTERVAL, RANGE = "10s", "10m"
DEADLINE_SECONDS, POLL_SECONDS = 40.0, 0.1


def missing() -> str | None:
    """What is not installed; None if all is."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)}" if absent else None


def rules(alerts: Path) -> dict[str, Any]:
    """The chart's alerts, about a release as the chart would make them for it."""
    release = f'job="{JOB}",namespace="{NAMESPACE}"'
    text = alerts.read_text(encoding="utf-8").replace("RELEASE", release)
    return dict(yaml.safe_load(text))


def impatient(given: dict[str, Any]) -> dict[str, Any]:
    """The same, but each waits a second where it waits a minute."""
    text = json.dumps(given)
    made: dict[str, Any] = json.loads(text)
    for group in made["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = rule["for"].replace("m", "s")
    return made


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(condition: Callable[[], Found], what: str, seconds: float = DEADLINE_SECONDS) -> Found:
    """Waits for something that comes; returns it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(POLL_SECONDS)


class Prometheus:
    """A server of its own, with pages of nodes by their names to scrape."""

    def __init__(self, home: Path, pages: dict[str, str], alerts: dict[str, Any]) -> None:
        home.mkdir()
        targets = [
            {"targets": [page], "labels": {"namespace": NAMESPACE, "pod": name}}
            for name, page in pages.items()
        ]
        (home / "rules.yml").write_text(yaml.safe_dump(alerts))
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_SECONDS}s",
                "scrape_timeout": f"{SCRAPE_SECONDS}s",
                "evaluation_interval": f"{SCRAPE_SECONDS}s",
            },
            "rule_files": [str(home / "rules.yml")],
            "scrape_configs": [{"job_name": JOB, "static_configs": targets}],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_port()}"
        self._log = home / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={home / 'prometheus.yml'}",
                    f"--storage.tsdb.path={home / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until(self._is_ready, "prometheus is ready")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **asked: str) -> Any:
        """What its API says."""
        query = urllib.parse.urlencode(asked)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                told = json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{asked}: {refused.read().decode()}") from refused
        assert told["status"] == "success", told
        return told["data"]

    def series(
        self, query: str, seconds: float, step: float, end: float | None = None
    ) -> list[dict[str, Any]]:
        """What a query gives over the last seconds, or those before `end`: labels and values."""
        end = time.time() if end is None else end
        begin = end - seconds
        found = self.ask("query_range", query=query, start=f"{begin}", end=f"{end}", step=f"{step}")
        return list(found["result"])

    def number(self, query: str) -> float:
        """What a query gives now: its first value, 0 if there is none."""
        found: Sequence[Any] = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def alerts(self) -> dict[str, dict[str, Any]]:
        """All alerts that it knows, by name: their health, state and what is wrong with whom."""
        groups = self.ask("rules", type="alert")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}
