"""The pictures of the dashboards in docs/images: what a Prometheus that watches three nodes under
load has answered for each panel, drawn here. KVSTRATA_PICTURES says where they go.
"""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import pytest
from boards import Panel, board, legend
from browser import Browser
from conftest import DASHBOARDS, Watched
from drawing import WIDTH, Line, page

BYTES_MAX = 300_000
STEP_SECONDS = 2.0
CAPTION = (
    "Three nodes under load. Each panel is what a Prometheus has answered to its queries over {} "
    "minutes; the drawing is not Grafana's."
)


def lines_of(watched: Watched, panel: Panel, seconds: float, end: float) -> list[Line]:
    """What comes of its queries, at the same moments."""
    lines = []
    for form, query in panel.queries:
        for one in watched.prometheus.series(query, seconds, STEP_SECONDS, end):
            points = [(float(at), float(value)) for at, value in one["values"]]
            kept = [(at, value) for at, value in points if not math.isnan(value)]
            lines.append(Line(legend(form, one["metric"]), kept))
    return lines


@pytest.mark.skipif(
    "KVSTRATA_PICTURES" not in os.environ, reason="makes the pictures of docs/images"
)
def test_pictures_of_the_dashboards(watched: Watched, tmp_path: Path) -> None:
    seconds = float(os.environ.get("KVSTRATA_PICTURE_SECONDS", "280"))
    # Nothing to wait for but the time that the charts show.
    threading.Event().wait(seconds)
    assert watched.load.rounds > 0 and watched.load.problems == []
    (tmp_path / "browser").mkdir()
    browser = Browser(tmp_path / "browser")
    try:
        for path in sorted(DASHBOARDS.glob("*.json")):
            shown = board(path, watched.prometheus)
            end = time.time()
            answers = {p.title: lines_of(watched, p, seconds, end) for p in shown.panels}
            text = page(shown, answers, end - seconds, end, CAPTION.format(round(seconds / 60)))
            (tmp_path / "page.html").write_text(text, encoding="utf-8")
            browser.size(WIDTH + 24, 600)
            browser.open(f"file://{tmp_path / 'page.html'}")
            assert browser.run("document.documentElement.scrollWidth") <= WIDTH + 24
            picture = Path(os.environ["KVSTRATA_PICTURES"]) / f"dashboard-{shown.name}.png"
            browser.picture(picture)
            assert picture.stat().st_size < BYTES_MAX
            assert browser.errors == []
    finally:
        browser.close()
