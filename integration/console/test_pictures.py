"""The pictures of the console in docs/images: one of three nodes under load, as it is seen on a
large screen and on a phone. KVSTRATA_PICTURES says where they go, and that they are made.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import Browser, Start
from nodes import cluster
from server import BINARY
from traffic import traffic

READY = "!document.getElementById('state').hidden"
DRAWN = (
    "document.querySelector('#hits svg') !== null && document.querySelector('#bytes svg') !== null"
)
BYTES_MAX = 300_000
# Two models, each with engines that come back to long contexts, over a dram too small for them.
TRACES = {"Qwen3-Coder-30B": ("11", "24"), "Llama-3.3-70B": ("12", "10")}
SIZES = (
    "dram.capacity=128MiB",
    "nvme.capacity=320MiB",
    "nvme.segment_bytes=4MiB",
    "nvme.daily_writes=none",
)


def traces(home: Path) -> list[Path]:
    """One for each model, of so many sessions."""
    made = []
    for model, (seed, sessions) in TRACES.items():
        path = home / f"{model}.jsonl.zst"
        options = ["--seed", seed, "--sessions", sessions, "--duration", "1h", "--turns-max", "30"]
        command = [str(BINARY), "gen-trace", str(path), *options]
        subprocess.run(command, check=True, capture_output=True)
        made.append(path)
    return made


@pytest.mark.skipif(
    "KVSTRATA_PICTURES" not in os.environ, reason="makes the pictures of docs/images"
)
def test_pictures_for_the_documentation(
    browser: Browser, start: Start, tmp_path: Path, pictures: Path
) -> None:
    seconds = float(os.environ.get("KVSTRATA_PICTURE_SECONDS", "280"))
    nodes = cluster(start, tmp_path, *SIZES)
    with traffic(tmp_path, nodes, traces(tmp_path), requests=150) as engines:
        # Nothing to wait for but the time that the charts show.
        threading.Event().wait(seconds)
        assert engines.rounds > 0
        # All of a large screen, and as much of a phone as a thumb's first move shows.
        for name, width, height, phone in (
            ("console.png", 1180, 900, False),
            ("console-phone.png", 390, 1560, True),
        ):
            browser.size(width, height, phone=phone, dark=phone)
            browser.open(f"http://{nodes[0].http}/console")
            browser.wait(READY)
            browser.wait(DRAWN)
            browser.wait("document.querySelectorAll('#members .nodes li').length === 3")
            browser.picture(pictures / name, whole=not phone)
            assert (pictures / name).stat().st_size < BYTES_MAX
            assert browser.errors == []
    assert engines.problems == []
