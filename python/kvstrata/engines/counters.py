"""What an adapter counts: what became of its calls, and how long the engine waited in them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["CALL_BUDGET", "Counters"]

CALL_BUDGET = 0.001
"""Seconds that a call on an engine's scheduler may take."""
_CALLS_MAX = 4096
"""Times of calls that are kept for who does not take them."""


class Counters:
    """Sums by name. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}
        self._slowest = 0.0
        self._took: list[float] = []
        self._longest_often = 0.0

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a sum."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + count

    @contextmanager
    def call(self, *, often: bool = False) -> Iterator[None]:
        """Measures one call on the scheduler's thread.

        `calls` counts them, `slow_calls` those over `CALL_BUDGET`; `slowest` has the longest. Of
        calls that come `often`, such as one for each block, `take_calls` has the longest only.
        """
        begun = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            with self._lock:
                self._sums["calls"] = self._sums.get("calls", 0) + 1
                if took > CALL_BUDGET:
                    self._sums["slow_calls"] = self._sums.get("slow_calls", 0) + 1
                self._slowest = max(self._slowest, took)
                if often:
                    self._longest_often = max(self._longest_often, took)
                elif len(self._took) < _CALLS_MAX:
                    self._took.append(took)

    def take_calls(self) -> list[float]:
        """Seconds that calls took since the last time."""
        with self._lock:
            took, self._took = self._took, []
            if self._longest_often:
                took.append(self._longest_often)
                self._longest_often = 0.0
            return took

    @property
    def slowest(self) -> float:
        """Seconds that the longest call took."""
        return self._slowest

    def __getitem__(self, name: str) -> int:
        """The sum of this name, 0 if nothing was added."""
        with self._lock:
            return self._sums.get(name, 0)

    def snapshot(self) -> dict[str, int]:
        """All sums so far."""
        with self._lock:
            return dict(self._sums)
