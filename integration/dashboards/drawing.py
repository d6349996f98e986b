"""Draws what Prometheus has answered for the panels of a dashboard, at the places that they have in
Grafana. It is not Grafana that draws: one line for each series, stacked where a panel says so.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from boards import Board, Panel

WIDTH, ROW_HEIGHT = 1200, 26
COLUMN = WIDTH / 24
PLOT_WIDTH, PLOT_HEIGHT = 380, 120
COLOURS = (
    "#0d8f7e",
    "#2f6fe0",
    "#9647d6",
    "#d9a514",
    "#c0392b",
    "#5b6472",
    "#1f9d3a",
    "#e67e22",
    "#17a2b8",
    "#ad1457",
)
LEGENDS_MAX = 8
STYLE = """
body { margin: 0; padding: 12px; width: 1200px; background: #f5f6f8; color: #1a1f29;
  font: 12px/1.35 "DejaVu Sans", sans-serif; }
h1 { font-size: 18px; margin: 0 0 2px; } h2 { font-size: 14px; margin: 12px 0 6px; }
p { margin: 6px 0 0; color: #5b6472; }
.row { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; }
.panel { background: #fff; border: 1px solid #e1e4ea; border-radius: 6px; padding: 8px 10px; }
.panel h3 { font-size: 13px; margin: 0 0 4px; }
.plot { position: relative; height: 120px; }
.plot svg { width: 100%; height: 120px; display: block; }
.plot span { position: absolute; left: 3px; font-size: 11px; color: #5b6472;
  background: #fffc; padding: 0 2px; }
.key { display: flex; flex-wrap: wrap; gap: 0 12px; margin-top: 4px; font-size: 11px; }
.key i { display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 4px; }
.stats { display: flex; flex-wrap: wrap; gap: 4px 18px; }
.stats b { font-size: 20px; display: block; }
"""


@dataclass
class Line:
    """A series with what is written beside it; values that are no number are left out."""

    name: str
    points: list[tuple[float, float]]

    @property
    def last(self) -> float:
        """Its last value."""
        return self.points[-1][1] if self.points else math.nan

    @property
    def largest(self) -> float:
        """Its largest value."""
        return max((value for _, value in self.points), default=0.0)


def worded(value: float, unit: str) -> str:
    """A value in its unit, as a reader wants it."""
    if math.isnan(value):
        return "none yet"
    if unit == "percentunit":
        return f"{100 * value:.1f} %"
    if unit in ("bytes", "Bps"):
        ending = "/s" if unit == "Bps" else ""
        for name in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or name == "GiB":
                return f"{short(value)} {name}{ending}"
            value /= 1024
    if unit == "s":
        for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
            if value * factor >= 1 or name == "µs":
                return "0 s" if value == 0 else f"{short(value * factor)} {name}"
    if unit == "currencyUSD":
        return f"$ {value:.2f}"
    return short(value) + {"ops": "/s", "reqps": "/s"}.get(unit, "")


def short(value: float) -> str:
    """A number in three or four digits."""
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value == round(value) or value >= 100 else f"{value:.3g}"


def path(points: list[tuple[float, float]], begin: float, span: float, top: float) -> str:
    """Points as a path, from the left to the right."""
    made = []
    for at, value in points:
        x = PLOT_WIDTH * (at - begin) / span
        made.append(f"{x:.1f} {PLOT_HEIGHT * (1 - value / top):.1f}")
    return "M" + "L".join(made)


def plot(panel: Panel, lines: list[Line], begin: float, end: float) -> str:
    """A chart over the time from `begin` to `end`."""
    span = end - begin
    drawn: list[tuple[list[tuple[float, float]], list[tuple[float, float]]]] = []
    below: dict[float, float] = {}
    for line in lines:
        floor = [(at, below.get(at, 0.0)) for at, _ in line.points]
        if panel.stacked:
            over = [(at, value + below.get(at, 0.0)) for at, value in line.points]
            below |= dict(over)
        else:
            over = line.points
        drawn.append((over, floor))
    top = max((value for over, _ in drawn for _, value in over), default=0.0) or 1.0
    if panel.unit == "percentunit":
        top = 1.0
    shapes = [
        f'<path d="M0 {y}H{PLOT_WIDTH}" stroke="#e1e4ea" fill="none"/>'
        for y in (0.5, PLOT_HEIGHT / 2, PLOT_HEIGHT - 0.5)
    ]
    for number, (over, floor) in enumerate(drawn):
        if not over:
            continue
        colour = COLOURS[number % len(COLOURS)]
        outline = path(over, begin, span, top)
        if panel.stacked:
            back = path(floor[::-1], begin, span, top).replace("M", "L", 1)
            shapes.append(f'<path d="{outline}{back}Z" fill="{colour}" fill-opacity=".55"/>')
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.6"'
        shapes.append(f'<path d="{outline}" {stroke} vector-effect="non-scaling-stroke"/>')
    scales = "".join(
        f'<span style="top:{y}px">{worded(part * top, panel.unit)}</span>'
        for part, y in ((1.0, 1), (0.5, 53))
    )
    box = f'viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" preserveAspectRatio="none"'
    return f'<div class="plot"><svg {box}>{"".join(shapes)}</svg>{scales}</div>'


def key(panel: Panel, lines: list[Line]) -> str:
    """The names of the lines and their last values; the largest come first if there are many."""
    numbered = list(enumerate(lines))
    if len(numbered) > LEGENDS_MAX:
        numbered.sort(key=lambda each: -each[1].largest)
    items = [
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>'
        f"{html.escape(line.name)} {worded(line.last, panel.unit)}</span>"
        for number, line in numbered[:LEGENDS_MAX]
    ]
    more = len(numbered) - LEGENDS_MAX
    if more > 0:
        items.append(f"<span>and {more} more</span>")
    return f'<div class="key">{"".join(items)}</div>'


def stats(panel: Panel, lines: list[Line]) -> str:
    """A panel of single numbers."""
    items = [
        f"<span><b>{worded(line.last, panel.unit)}</b>{html.escape(line.name)}</span>"
        for line in lines
    ]
    return f'<div class="stats">{"".join(items)}</div>'


def page(
    board: Board, answers: dict[str, list[Line]], begin: float, end: float, caption: str
) -> str:
    """The dashboard as a page, with what each panel's queries have given."""
    made = [f"<h1>{html.escape(board.title)}</h1><p>{html.escape(caption)}</p>"]
    tops = [y for _, y in board.rows] + [10**6]
    for (title, y), following in zip(board.rows, tops[1:], strict=True):
        panels = [panel for panel in board.panels if y < panel.place["y"] < following]
        panels.sort(key=lambda panel: (panel.place["y"], panel.place["x"]))
        if all(line.largest == 0.0 for panel in panels for line in answers[panel.title]):
            made.append(f"<p>Not drawn, for nothing but zeros: <b>{html.escape(title)}</b></p>")
            continue
        shown = []
        for panel in panels:
            lines = answers[panel.title]
            body = (
                stats(panel, lines)
                if panel.kind == "stat"
                else plot(panel, lines, begin, end) + key(panel, lines)
            )
            shown.append(f'<div class="panel"><h3>{html.escape(panel.title)}</h3>{body}</div>')
        made.append(f'<h2>{html.escape(title)}</h2><div class="row">{"".join(shown)}</div>')
    head = f'<meta charset="utf-8"><title>{html.escape(board.title)}</title>'
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(made)}</body></html>"
