"""The report's page."""

from __future__ import annotations

import math
import re
from html import escape
from typing import TYPE_CHECKING, Any

from areal_view.chart import Series, line_chart, stacked_chart

if TYPE_CHECKING:
    from collections.abc import Sequence

    Lines = Sequence[dict[str, Any]]

STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --dim: #66708a; --line: #d9deea; --card: #fff; --page: #f3f5fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaf2; --dim: #98a2ba; --line: #333b4d; --card: #1b2130; --page: #12161f; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 15px; margin: 0 0 2px; } p { color: var(--dim); margin: 0 0 10px; }
.tiles, .charts { display: grid; gap: 14px; margin: 20px 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); } .small svg text { font-size: 15px; }
h3 { font-size: 20px; margin: 34px 0 0; } svg { overflow: visible; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; } .tile span { color: var(--dim); }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--dim); } .grid { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12px; color: var(--dim); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
td { border-top: 1px solid var(--line); padding: 5px 8px; }
td.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
td.number { text-align: right; width: 70px; font-variant-numeric: tabular-nums; }
pre { font-size: 12px; overflow-x: auto; } summary { cursor: pointer; font-weight: 600; }
"""

CHARTS = (
    (
        "Reward",
        "mean of all finished episodes, before reward shaping and group filters, and the score on held-out data",
        ("reward/all_episodes", "evaluation/reward"),
    ),
    ("Loss", "negative log-likelihood of the completions", ("train/negative_log_likelihood",)),
    (
        "Staleness",
        "batches between a token's weights and the batch that trains on it",
        ("staleness/mean", "staleness/max"),
    ),
    ("Entropy", "of the policy at the tokens it sampled, in nats", ("train/entropy",)),
    (
        "Behavior against trainer",
        "estimated KL(sampling policy ‖ policy at the start of the batch)",
        ("train/behavior_kl",),
    ),
    ("Response length", "sampled tokens in a sequence", ("batch/response_length", "evaluation/response_length")),
    ("Clipping", "share of tokens at which the ratio is clipped", ("train/clip_fraction",)),
    ("Gradient norm", "before clipping", ("train/gradient_norm",)),
)
OTHERS = re.compile(r"(train|reward)/|agents/(turns|calls|malformed_calls)$")
"""Metrics that get a small chart each, unless one above has them already."""
PHASES = ("wait", "train", "weight_sync", "evaluate", "checkpoint")


def render_page(name: str, steps: int, lines: Lines, samples: Lines, config: str, note: str = "") -> str:
    """A self-contained page.

    Args:
        name: of the run.
        steps: of the run.
        lines: of `metrics.jsonl`.
        samples: of `samples.jsonl`.
        config: the complete config as YAML.
        note: stands behind the number of steps.
    """
    cards = [card for title, text, keys in CHARTS if (card := _curves(title, text, keys, lines))]
    cards += [card for card in (_staleness_shares(lines), _time_split(lines)) if card]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(name)} · areal</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style><main>'
        f"<h1>{escape(name)}</h1><p>{len([x for x in lines if x['step']])} of {steps} steps{note}</p>"
        f'<div class="tiles">{"".join(_tiles(lines))}</div><div class="charts">{"".join(cards)}</div>{_others(lines)}'
        f"{_samples(samples)}<details class='card'><summary>Config</summary><pre>{escape(config)}</pre></details>"
        "</main></html>"
    )


def _points(lines: Lines, key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if key in line]


def _tiles(lines: Lines) -> list[str]:
    tiles = []
    for key, label in (
        ("evaluation/reward", "held-out score"),
        ("reward/all_episodes", "reward"),
        ("train/negative_log_likelihood", "negative log-likelihood"),
        ("train/accuracy", "accuracy"),
    ):
        if points := _points(lines, key):
            tiles.append((f"{points[0][1]:.2f} → {points[-1][1]:.2f}", label))
    if staleness := _points(lines, "staleness/mean"):
        tiles.append((f"{sum(y for _, y in staleness) / len(staleness):.2f}", "mean staleness, batches"))
    trained = [line for line in lines if "batch/sequences" in line]
    if seconds := sum(line.get("time/step_s", 0.0) for line in trained):
        tiles.append(
            (f"{sum(line['batch/sequences'] for line in trained) / seconds:,.0f}", "samples trained on per second")
        )
        tiles.append((f"{seconds:,.0f} s", "in training steps"))
    return [f'<div class="card tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles]


def _card(title: str, text: str, chart: str) -> str:
    return f'<section class="card"><h2>{title}</h2><p>{text}</p>{chart}</section>'


def _curves(title: str, text: str, keys: Sequence[str], lines: Lines) -> str:
    series = [
        Series(key, points, dots=key.startswith("evaluation/")) for key in keys if (points := _points(lines, key))
    ]
    return _card(title, text, line_chart(series, floor_zero=True)) if series else ""


def _others(lines: Lines) -> str:
    """A small chart of each metric that has none yet, those of one role beside one another."""
    drawn = {key for _, _, keys in CHARTS for key in keys}
    groups: dict[str, list[str]] = {}
    for key in sorted({key for line in lines for key in line if OTHERS.match(key)} - drawn):
        # A value that is no number has no place on an axis, and would take every other one's with it.
        if points := [(x, y) for x, y in _points(lines, key) if math.isfinite(y)]:
            card = f'<section class="card"><h2>{escape(key)}</h2>{line_chart([Series(key, points)])}</section>'
            groups.setdefault(key.rpartition("/")[0], []).append(card)
    return "".join(
        f'<h3>{escape(group)}</h3><div class="charts small">{"".join(cards)}</div>'
        for group, cards in sorted(groups.items(), key=lambda one: (not one[0].startswith("train"), one[0]))
    )


def _staleness_shares(lines: Lines) -> str:
    ages = sorted({int(key.rsplit("_", 1)[1]) for line in lines for key in line if key.startswith("staleness/share_")})
    rows = [
        (line["step"], [line.get(f"staleness/share_{age}", 0.0) for age in ages])
        for line in lines
        if "staleness/mean" in line
    ]
    if not rows:
        return ""
    names = [f"{age} batch{'es' if age != 1 else ''} old" for age in ages]
    return _card("Staleness histogram", "share of the trained tokens of each age", stacked_chart(names, rows))


def _time_split(lines: Lines) -> str:
    rows = [(line["step"], [line.get(f"time/{phase}_s", 0.0) for phase in PHASES]) for line in lines if line["step"]]
    if not rows:
        return ""
    return _card("Where the trainer's time goes", "share of each step", stacked_chart(PHASES, rows))


def _samples(samples: Lines) -> str:
    if not samples:
        return ""
    chosen = samples[:: max(1, len(samples) // 6)][:6]
    if samples[-1] not in chosen:
        chosen = [*chosen, samples[-1]]
    rows = [
        f'<tr><td class="number">{group["version"]}</td><td class="text">{escape(episode["text"])}</td>'
        f'<td class="number">{episode["reward"]:.2f}</td></tr>'
        for group in chosen
        for episode in group["episodes"]
    ]
    heading = '<tr><td class="number">version</td><td>prompt and answer</td><td class="number">reward</td></tr>'
    return f'<section class="card"><h2>Samples</h2><table>{heading}{"".join(rows)}</table></section><br>'
