"""Whether every composition learns: reward from one start, four updates a batch, so that ratios leave 1 and clips act.

    python benchmarks/learning_matrix.py [--seeds 3] [--steps 60] [--staleness 1] [--output FILE] [--chart FILE.svg]

On the task of `toy_task.py`, at staleness 1. The table has the mean reward of the first batch, of batches 16 to 30 and
of the last ten, and the largest share of a step's tokens that a clip, a mask or a cap has changed. `--output` keeps the
curves, `--chart` draws them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from toy_task import POSITIONS, learn

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"loss_aggregation": {"length": POSITIONS}},
    "dapo": {},
    "gspo": {},
    "gmpo": {},
    "cispo": {},
    "sapo": {},
    "rloo": {},
    "reinforce_pp": {},
    "lite_ppo": {},
    "m2po": {},
    "ppo": {"warmup_steps": 0},
    "dppo": {},
}
CLIPPED = ("clip_fraction", "distrusted_fraction", "truncated_fraction")


def main() -> None:
    """Train with every composition and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = asked.only.split(",") if asked.only else list(COMPOSITIONS)
    curves: dict[str, list[list[float]]] = {}
    print("| composition | first batch | batches 16 to 30 | last ten (each seed) | largest share of tokens |")
    print("|---|---|---|---|---|")
    for name in names:
        algorithm = {"type": f"grpo/{name}", **COMPOSITIONS[name]}
        runs = [
            list(learn(algorithm, steps=asked.steps, staleness=asked.staleness, seed=seed))
            for seed in range(asked.seeds)
        ]
        curves[name] = [[line["reward"] for line in run] for run in runs]
        ends = [statistics.fmean(curve[-10:]) for curve in curves[name]]
        middle = statistics.fmean(statistics.fmean(curve[15:30]) for curve in curves[name])
        clips = {key: max(line.get(key, 0.0) for run in runs for line in run) for key in CLIPPED}
        shown = ", ".join(f"{key} {value:.3f}" for key, value in clips.items() if value) or "-"
        first = statistics.fmean(curve[0] for curve in curves[name])
        print(
            f"| `{name}` | {first:.2f} | {middle:.2f} | {' '.join(f'{end:.2f}' for end in ends)} | {shown} |",
            flush=True,
        )
        if min(ends) <= first:
            sys.stderr.write(f"{name} has learned nothing: {first:.2f} to {min(ends):.2f}\n")
    if asked.output:
        asked.output.write_text(json.dumps(curves))
    if asked.chart:
        draw(curves, asked.chart)


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """A small image for each composition, a line for each seed."""
    width, height, columns = 150, 90, 4
    rows = -(-len(curves) // columns)
    size = f"{columns * (width + 20) + 20} {rows * (height + 40) + 10}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">']
    for number, (name, runs) in enumerate(curves.items()):
        left, top = 20 + number % columns * (width + 20), 25 + number // columns * (height + 40)
        parts.append(f'<text x="{left}" y="{top - 6}" fill="#555">{name}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>')
        for run in runs:
            last = max(1, len(run) - 1)
            points = " ".join(f"{left + width * i / last:.1f},{top + height * (1 - y):.1f}" for i, y in enumerate(run))
            parts.append(f'<polyline points="{points}" fill="none" stroke="#2a6fb0" stroke-width="1.2" opacity="0.7"/>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
