"""The image of `curve.py`: reward and held-out score against seconds, as an SVG that needs no library."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from curve_table import SMOOTHED, rewards, scores, title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from curve_table import Point

    Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 300, 48, 12, 34, 44
COLORS = ("#3b6fd4", "#d9822b", "#2f9e6e", "#b0428f", "#7a6a4f", "#5fa8c9")


def draw(rows: Mapping[str, Sequence[Point]]) -> str:
    """Both panels side by side with one legend; rows of one way and several seeds share a color."""
    ways = list(dict.fromkeys(row.partition("/")[0] for row in rows))
    colors = {row: COLORS[ways.index(row.partition("/")[0]) % len(COLORS)] for row in rows}
    seconds = max((point["seconds"] for points in rows.values() for point in points), default=1.0)
    trained = {row: rewards(points, SMOOTHED) for row, points in rows.items()}
    held_out = {row: scores(points) for row, points in rows.items()}
    highest = max((y for curves in (trained, held_out) for curve in curves.values() for _, y in curve), default=0.0)
    parts = _panel(0, f"training reward, mean of {SMOOTHED} steps", trained, colors, seconds, highest, dots=False)
    parts += _panel(WIDTH, "held-out score", held_out, colors, seconds, highest, dots=True)
    for number, way in enumerate(ways):
        x, y = 2 * WIDTH - 210, HEIGHT - BOTTOM - 14 - 18 * (len(ways) - 1 - number)
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{COLORS[number % len(COLORS)]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{escape(title(way))}</text>')
    size = f'width="{2 * WIDTH}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    ground = f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join([ground, *parts]) + "\n</svg>\n"


def _panel(
    offset: float,
    name: str,
    curves: Mapping[str, Curve],
    colors: Mapping[str, str],
    seconds: float,
    highest: float,
    *,
    dots: bool,
) -> list[str]:
    """Axes and curves, so far from the image's left edge."""
    highest = highest or 1.0  # where nothing was ever right the axis still needs a height
    x_step, y_step = _interval(seconds), _interval(highest)
    right, top = seconds, y_step * math.ceil(highest / y_step)

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return offset + LEFT + x / right * width, HEIGHT - BOTTOM - y / top * height

    (x_0, y_0), (x_1, _) = place(0, 0), place(right, top)
    parts = [f'<text x="{x_0:.0f}" y="{TOP - 14}" font-weight="bold">{escape(name)}</text>']
    parts.append(f'<text x="{(x_0 + x_1) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">seconds</text>')
    for number in range(round(top / y_step) + 1):
        _, y = place(0, number * y_step)
        parts.append(f'<path d="M{x_0:.1f} {y:.1f}H{x_1:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x_0 - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:.3g}</text>')
    for number in range(math.floor(right / x_step) + 1):
        x, _ = place(number * x_step, 0)
        parts.append(f'<text x="{x:.1f}" y="{y_0 + 16:.1f}" text-anchor="middle">{number * x_step:.0f}</text>')
    for row, curve in curves.items():
        places = [place(x, y) for x, y in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[row]}" stroke-width="1.8"/>')
        if dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colors[row]}"/>' for x, y in places]
    return parts


def _interval(highest: float) -> float:
    """Between two lines of an axis: 1, 2 or 5 times a power of ten, about five of them."""
    rough = max(highest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
