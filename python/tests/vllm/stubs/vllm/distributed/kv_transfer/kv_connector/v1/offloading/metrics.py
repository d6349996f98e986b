"""What a tier counts."""

from __future__ import annotations

Labels = tuple[str, ...]


class OffloadingConnectorStats:
    """Values since the last time, by metric and labels."""

    def __init__(self) -> None:
        self.values: dict[str, dict[Labels, list[float]]] = {}

    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self.values

    def increase_counter(self, name: str, by: float = 1, labelvalues: Labels = ()) -> None:
        """Adds to a counter."""
        self.values.setdefault(name, {}).setdefault(labelvalues, []).append(by)

    def set_gauge(self, name: str, value: float, labelvalues: Labels = ()) -> None:
        """Sets a gauge."""
        self.values.setdefault(name, {})[labelvalues] = [value]

    def observe_histogram(self, name: str, value: float, labelvalues: Labels = ()) -> None:
        """Adds an observation."""
        self.values.setdefault(name, {}).setdefault(labelvalues, []).append(value)
