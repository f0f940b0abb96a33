"""How much stale samples cost, with and without decoupling: reward after equal samples at staleness 0, 1, 4 and 8.

    python benchmarks/off_policy.py [--seeds 3] [--steps 60] [--output FILE]

On the task of `toy_task.py`, GRPO with four updates a batch. *Naive* centers its clipping on the policy that sampled
and corrects for nothing; *decoupled* centers it on the policy at the start of the batch and weighs tokens by their
capped importance; *interpolated* takes a policy between the two by their versions, without a pass. The table has the
mean reward over batches 16 to 30, and over the last ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from toy_task import learn

VARIANTS = {
    "naive": {"type": "grpo/grpo", "proximal": "behavior", "corrections": []},
    "decoupled": {"type": "grpo/grpo"},
    "interpolated": {"type": "grpo/grpo", "proximal": "interpolated"},
}
STALENESS = (0, 1, 4, 8)


def main() -> None:
    """Train every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, help="rewards of every batch, as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, dict[int, list[list[float]]]] = {}
    for name, algorithm in VARIANTS.items():
        for staleness in STALENESS:
            found = []
            for seed in range(asked.seeds):
                lines = list(learn(algorithm, steps=asked.steps, staleness=staleness, seed=seed))
                found.append([line["reward"] for line in lines])
                sys.stderr.write(f"{name} at {staleness}, seed {seed}: {found[-1][0]:.2f} to {found[-1][-1]:.2f}\n")
            curves.setdefault(name, {})[staleness] = found
    for title, first, last in (("batches 16 to 30", 15, 30), ("the last ten", asked.steps - 10, asked.steps)):
        print(f"\n| {title} | " + " | ".join(f"staleness {s}" for s in STALENESS) + " |")
        print("|---|" + "---|" * len(STALENESS))
        for name, rows in curves.items():
            cells = []
            for staleness in STALENESS:
                means = [statistics.fmean(curve[first:last]) for curve in rows[staleness]]
                cells.append(f"{statistics.fmean(means):.2f} ({min(means):.2f}-{max(means):.2f})")
            print(f"| {name} | " + " | ".join(cells) + " |")
    if asked.output:
        asked.output.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
