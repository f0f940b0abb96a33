"""Whether every composition learns in true runs: the preset of each, on the demonstration's task, from one model.

    python benchmarks/learning_runs.py [--seeds 3] [--steps 60] [--only NAME,...] [--folder DIR] [--chart FILE.svg]

Each is `areal run grpo/NAME` with its processes, its engines and its own defaults: at most one version stale, four
updates a batch. Methods without a preset are changes of `grpo/grpo`. The table has the mean reward of the first ten
steps and of the last ten for each seed, and the largest share of a step's tokens that a clip, a mask or a cap has
changed. What `--folder` already holds is not made again.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from learning_matrix import CLIPPED, COMPOSITIONS, draw

from areal_core.runs import RunFolder

LESSONS = Path(__file__).with_name("solution_lessons.py")
ENDS = 10
"""Steps whose reward is averaged at either end."""
USES_SOLUTIONS = (
    f"model.source={{type: grpo/taught_model, steps: 1600, lessons: {{type: '{LESSONS}:Lessons', rows: 102400}}}}",
    "plugins=[finetuning,grpo,hf,fsdp,view]",
)
"""A model that has also learned to repeat a solution in its prompt, as self-distillation needs."""
CHANGES: dict[str, list[str]] = {
    "ipo_mask": ["algorithm.corrections=[grpo/ipo_mask]"],
    "vespo": ["algorithm.policy_loss=vespo", "algorithm.corrections=[]"],
    "pass_at_k": ["algorithm.advantage={type: pass_at_k, k: 4}"],
    "score_centering": ["algorithm.policy_loss=score_centering", "algorithm.corrections=[]", "sampling.top_logprobs=8"],
    "optimal_token_baseline": ["algorithm.advantage=optimal_token_baseline"],
    "sdpo": [
        *USES_SOLUTIONS,
        "algorithm=finetuning/sdpo",
        "workflow={type: finetuning/self_distillation, prompt_template: '{solution}{feedback}{prompt}', "
        "solution_template: '{solution};'}",
        "training.num_minibatches=1",
    ],
    "grpo_for_sdpo": [*USES_SOLUTIONS, "training.num_minibatches=1"],
    "muon": ["train_engine.optimizer=fsdp/muon", "train_engine.learning_rate=1e-3"],
}
"""Methods as changes of the preset grpo. `grpo_for_sdpo` is GRPO from the model of `sdpo`, with one update a
batch, too."""
REWARD = "reward/all_episodes"
"""Before group filters: DAPO keeps the groups whose answers differ, and their mean stays near a half."""


def main() -> None:
    """Make the runs that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="learning-"))
    curves: dict[str, list[list[float]]] = {}
    print("| composition | first ten steps | last ten (each seed) | largest share of tokens |")
    print("|---|---|---|---|")
    for name in asked.only.split(",") if asked.only else [*COMPOSITIONS, *CHANGES]:
        runs = [learn(name, seed, asked.steps, folder / f"{name}-{seed}") for seed in range(asked.seeds)]
        curves[name] = [[line.get(REWARD, line["reward/mean"]) for line in run] for run in runs]
        first = statistics.fmean(statistics.fmean(curve[:ENDS]) for curve in curves[name])
        ends = " ".join(f"{statistics.fmean(curve[-ENDS:]):.2f}" for curve in curves[name])
        shares = {key: max(line.get(f"train/{key}", 0.0) for run in runs for line in run) for key in CLIPPED}
        shown = ", ".join(f"{key} {share:.3f}" for key, share in shares.items() if share) or "-"
        print(f"| `{name}` | {first:.2f} | {ends} | {shown} |", flush=True)
    if asked.chart:
        draw(curves, asked.chart)


def learn(name: str, seed: int, steps: int, run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, which is made where it is not there whole.

    Raises:
        SystemExit: the run failed; its own words are on standard error.
    """
    if len(RunFolder(run_dir).read_metrics()) < steps:
        preset = "grpo/grpo" if name in CHANGES else f"grpo/{name}"
        words = [
            preset,
            f"steps={steps}",
            f"seed={seed}",
            "evaluation=null",
            f"run_dir={run_dir}",
            *CHANGES.get(name, []),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "areal_core", "run", *words], stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} with seed {seed} ended with exit code {done.returncode}: see {run_dir}")
    return RunFolder(run_dir).read_metrics()[:steps]


if __name__ == "__main__":
    main()
