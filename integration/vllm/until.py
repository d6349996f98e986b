"""Waiting for what must come to hold."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE = 60.0
"""Seconds after which a test gives up."""


def until(what: str, holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, f"it does not come to be so: {what}"
        time.sleep(0.02)
