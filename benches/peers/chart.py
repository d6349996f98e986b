"""Bar charts as SVG: a group of bars for each thing measured, two measures side by side."""

from __future__ import annotations

from html import escape

NAMES, BARS, NUMBERS, BAR, HEAD = 190, 260, 60, 20, 34
COLOURS = {"kvstrata": "#c2410c", "floor": "#a8a29e", "": "#1d4ed8"}

Pairs = dict[str, tuple[float, float]]


def colour(name: str) -> str:
    """Ours, the floors, and the others."""
    return next(value for start, value in COLOURS.items() if name.startswith(start))


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'


def bars(x: float, y: float, values: list[tuple[str, float]]) -> list[str]:
    """One measure of one group, longest bar as wide as there is room."""
    most = max(value for _, value in values)
    parts = []
    for row, (name, value) in enumerate(values):
        top, width = y + row * BAR, BARS * value / most
        shape = f'width="{width:.1f}" height="{BAR - 5}" fill="{colour(name)}"'
        parts.append(f'<rect x="{x:.0f}" y="{top:.0f}" {shape}/>')
        parts.append(text(x + width + 5, top + 12, f"{value:.2f}"))
    return parts


def draw(title: str, measures: tuple[str, str], groups: dict[str, Pairs]) -> str:
    """The whole picture: `groups` has for each group the two values of each name."""
    parts = [text(12, 24, title, 'font-size="16" font-weight="bold"')]
    columns = [NAMES, NAMES + BARS + NUMBERS + 20]
    y = 40.0
    for group, pairs in groups.items():
        parts.append(text(12, y + 18, group, 'font-size="14" font-weight="bold"'))
        for column, measure in zip(columns, measures, strict=True):
            parts.append(text(column, y + 18, measure, 'fill="#57534e"'))
        y += HEAD
        for row, name in enumerate(pairs):
            parts.append(text(NAMES - 8, y + row * BAR + 12, name, 'text-anchor="end"'))
        for at, column in enumerate(columns):
            parts += bars(column, y, [(name, pair[at]) for name, pair in pairs.items()])
        y += len(pairs) * BAR + 12
    width = columns[1] + BARS + NUMBERS
    box = f'viewBox="0 0 {width} {y:.0f}" width="{width}" height="{y:.0f}"'
    style = 'font-family="sans-serif" font-size="12" fill="#1c1917"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>'
    return "\n".join(
        [head, '<rect width="100%" height="100%" fill="#ffffff"/>', *parts, "</svg>\n"]
    )
