"""A real browser and real servers for the tests of this directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from browser import Browser
from server import Server
from starting import Start, start

__all__ = ["Browser", "Server", "Start", "pictures", "start"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A browser of its own."""
    home = tmp_path / "browser"
    home.mkdir()
    browser = Browser(home)
    yield browser
    browser.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where pictures go: into the documentation, if KVSTRATA_PICTURES says so."""
    named = os.environ.get("KVSTRATA_PICTURES")
    return Path(named) if named else tmp_path
