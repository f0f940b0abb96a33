"""Small charts as SVG text, drawn without a library so that the report is one file that opens anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 220, 56, 28, 12, 12
COLORS = ("#3b6fd4", "#d9822b", "#2f9e6e", "#b0428f", "#7a6a4f", "#5fa8c9")


class Series:
    """One curve: its name and its points, by ascending x."""

    def __init__(self, name: str, points: Sequence[tuple[float, float]], *, dots: bool = False) -> None:
        self.name = name
        self.points = list(points)
        self.dots = dots


def line_chart(series: Sequence[Series], *, floor_zero: bool = False) -> str:
    """Curves over steps with axes, grid lines and a legend."""
    shown = [one for one in series if one.points]
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points] + ([0.0] if floor_zero else [])
    low, high = min(ys), max(ys)
    if high - low < 1e-9 * max(1.0, abs(high)):
        half = max(0.5, abs(high) / 2)
        low, high = low - half, high + half
    left, right = min(xs), max(*xs, min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP),
        )

    parts = _axes(left, right, low, high, place)
    for number, one in enumerate(shown):
        color = COLORS[number % len(COLORS)]
        points = [place(x, y) for x, y in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        if one.dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    return _svg(parts) + legend([one.name for one in shown])


def stacked_chart(names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]]) -> str:
    """Shares that fill a column for each step; `rows` holds x and one value for each name."""
    left, right = rows[0][0], max(rows[-1][0], rows[0][0] + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP),
        )

    parts = _axes(left, right, 0.0, 1.0, place)
    lower = [0.0] * len(rows)
    for number in range(len(names)):
        upper = []
        for base, (_, values) in zip(lower, rows, strict=True):
            upper.append(base + values[number] / (sum(values) or 1.0))
        edge = [place(x, y) for (x, _), y in zip(rows, upper, strict=True)]
        edge += [place(x, y) for (x, _), y in reversed(list(zip(rows, lower, strict=True)))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        parts.append(f'<polygon fill="{COLORS[number % len(COLORS)]}" opacity="0.85" points="{path}"/>')
        lower = upper
    return _svg(parts) + legend(names)


def legend(names: Sequence[str]) -> str:
    """The colors' names, left out for a single curve."""
    if len(names) < 2:
        return ""
    entries = [
        f'<span><i style="background:{COLORS[number % len(COLORS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    ]
    return f'<div class="legend">{"".join(entries)}</div>'


def _axes(left: float, right: float, low: float, high: float, place: object) -> list[str]:
    parts = []
    for index in range(5):
        value = low + (high - low) * index / 4
        _, y = place(left, value)  # type: ignore[operator]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for index in range(5):
        step = left + (right - left) * index / 4
        x, _ = place(step, low)  # type: ignore[operator]
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:.0f}</text>')
    return parts


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
