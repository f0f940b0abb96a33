"""The image of `curve.py`: reward and held-out score against seconds, reward against samples; plain SVG."""

from __future__ import annotations

import math
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from curve_table import REWARD, SMOOTHED, rewards, scores, title

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from curve_table import Point

    Curve = Sequence[tuple[float, float]]
    Curves = Mapping[str, Sequence[Curve]]  # of each way, one for each seed

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 300, 48, 20, 34, 44
"""Of a panel, and the margins around its axes."""
COLORS = ("#3b6fd4", "#d9822b", "#2f9e6e", "#b0428f", "#7a6a4f", "#5fa8c9", "#8fae3c")


def draw(rows: Mapping[str, Sequence[Point]], titles: Mapping[str, str] | None = None) -> str:
    """Three panels, and the legend in the place of a fourth; the rows of a way are its seeds.

    Args:
        rows: by `way/seed`.
        titles: of the ways; without them those of `curve.py`.
    """
    ways: dict[str, list[Sequence[Point]]] = {}
    for row, points in rows.items():
        ways.setdefault(row.partition("/")[0], []).append(points)

    def curves(of: Callable[[Sequence[Point]], Curve]) -> Curves:
        return {way: [curve for points in seeds if (curve := of(points))] for way, seeds in ways.items()}

    reward, name = curves(lambda points: rewards(points, SMOOTHED)), f"training reward, mean of {SMOOTHED} steps"
    held_out, sampled = curves(scores), curves(rewards_by_samples)
    (seconds, highest), (samples, _) = _ends(reward, held_out), _ends(sampled)
    parts = [
        f'<rect width="{2 * WIDTH}" height="{2 * HEIGHT}" fill="#fff"/>',
        *_panel(0, 0, name, "seconds", reward, seconds, highest),
        *_panel(WIDTH, 0, "held-out score", "seconds", held_out, seconds, highest, dots=True),
        *_panel(0, HEIGHT, name, "samples trained on", sampled, samples, highest),
        *_legend(WIDTH, HEIGHT, {(titles or {}).get(way) or title(way): seeds for way, seeds in ways.items()}),
    ]
    size = f'width="{2 * WIDTH}" height="{2 * HEIGHT}" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def rewards_by_samples(points: Sequence[Point]) -> Curve:
    """Rewards of the training batches, smoothed, and the samples that were trained on up to each."""
    samples = accumulate(point["batch/sequences"] for point in points if REWARD in point)
    return [(sample, reward) for sample, (_, reward) in zip(samples, rewards(points, SMOOTHED), strict=True)]


def spread(seeds: Sequence[Curve]) -> tuple[Curve, Curve, Curve]:
    """The lowest, the median and the highest of the curves of a way's seeds.

    They have a point wherever any seed has one, between the last of the beginnings and the first of the ends; the other
    seeds are interpolated there.
    """
    begin = max((curve[0][0] for curve in seeds), default=0.0)
    end = min((curve[-1][0] for curve in seeds), default=0.0)
    common = sorted({x for curve in seeds for x, _ in curve if begin <= x <= end})
    if not common:
        return [], [], []
    each = [np.interp(common, *np.transpose(curve)) for curve in seeds]
    lowest, median, highest = np.quantile(each, (0, 0.5, 1), axis=0).tolist()
    return _curve(common, lowest), _curve(common, median), _curve(common, highest)


def _curve(x: Sequence[float], y: Sequence[float]) -> Curve:
    return list(zip(x, y, strict=True))


def _ends(*panels: Curves) -> tuple[float, float]:
    """The furthest x and the highest y; 1 instead of 0, for an axis needs a length."""
    places = [place for curves in panels for seeds in curves.values() for curve in seeds for place in curve]
    return max((x for x, _ in places), default=0.0) or 1.0, max((y for _, y in places), default=0.0) or 1.0


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _legend(offset_x: float, offset_y: float, ways: Mapping[str, Sequence[object]]) -> list[str]:
    """An entry for each way by its title, and what a band is where there is one."""
    x, y = offset_x + LEFT, offset_y + TOP
    parts = []
    for number, way in enumerate(ways):
        parts.append(f'<rect x="{x}" y="{y - 6}" width="14" height="4" fill="{_color(number)}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{escape(way)}</text>')
        y += 18
    if any(len(seeds) > 1 for seeds in ways.values()):
        parts.append(f'<text x="{x}" y="{y + 8}" fill="#666">line: median of the runs; area: lowest to highest</text>')
    return parts


def _panel(
    offset_x: float,
    offset_y: float,
    name: str,
    unit: str,
    curves: Curves,
    right: float,
    highest: float,
    *,
    dots: bool = False,
) -> list[str]:
    """Axes and curves, so far from the image's upper left corner; dots are where a seed was measured."""
    x_step, y_step = _interval(right), _interval(highest)
    top = y_step * math.ceil(highest / y_step)

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return offset_x + LEFT + x / right * width, offset_y + HEIGHT - BOTTOM - y / top * height

    def path(curve: Curve) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in curve)

    (x_0, y_0), (x_1, _) = place(0, 0), place(right, top)
    parts = [f'<text x="{x_0:.0f}" y="{offset_y + TOP - 14}" font-weight="bold">{escape(name)}</text>']
    parts.append(f'<text x="{(x_0 + x_1) / 2:.0f}" y="{y_0 + 36:.0f}" text-anchor="middle">{unit}</text>')
    for number in range(round(top / y_step) + 1):
        _, y = place(0, number * y_step)
        parts.append(f'<path d="M{x_0:.1f} {y:.1f}H{x_1:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x_0 - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{number * y_step:.3g}</text>')
    for number in range(math.floor(right / x_step) + 1):
        x, _ = place(number * x_step, 0)
        parts.append(f'<text x="{x:.1f}" y="{y_0 + 16:.1f}" text-anchor="middle">{number * x_step:,.0f}</text>')
    areas, lines = [], []
    for number, seeds in enumerate(curves.values()):
        color, (low, median, high) = _color(number), spread(seeds)
        if len(seeds) > 1:
            areas.append(f'<polygon points="{path([*low, *reversed(high)])}" fill="{color}" fill-opacity="0.2"/>')
        lines.append(f'<polyline points="{path(median)}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        for x, y in [place(*point) for curve in seeds for point in curve if dots]:
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if len(seeds) == 1 else 2}" fill="{color}"/>')
    return [*parts, *areas, *lines]


def _interval(highest: float) -> float:
    """Between two lines of an axis: 1, 2 or 5 times a power of ten, about five of them."""
    rough = max(highest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
