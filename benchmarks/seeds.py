"""Many runs of one config at once, several on each GPU, to compare what they learn: one line for each kind of run.

    python benchmarks/seeds.py CONFIG FOLDER --gpus 0 1 2 3 --at-once 3 --rows RUN... [section.key=value ...]

A RUN is a row of `curve.py` and what it changes in the config, in one word of the shell: `async-1/0`, `"sync/3
train_engine.schedule=constant"`, `trl-colocated/1`. The number is the seed; runs that differ in nothing else are one
kind. Runs that share a GPU slow each other down, so compare seconds only where `--at-once` is 1. Without `--gpus`,
`--at-once` runs go on at a time. FOLDER keeps each run's metrics; a run that is there is not made again.

For each kind: samples/s and the parts of a step (without the first ten steps, or the first half of a shorter run, and
without evaluations), the mean reward of each fifth of the run, and the held-out score of each evaluation, seed by
seed. `surprise` is the mean of -log p of the sampled tokens less the entropy of the distribution that the trainer
has there, over the whole run: 0 where tokens were sampled from the policy, as they must be when nothing is stale.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from asynchronous import read_metrics

CURVE = Path(__file__).with_name("curve.py")
PARTS = {"waits": "wait_s", "trains": "train_s", "syncs": "weight_sync_s"}


def folder_of(folder: Path, run: str) -> Path:
    """Where a run keeps what it writes."""
    return folder / re.sub(r"[^\w.=-]+", "_", run)


def measure(run: str, folder: Path, gpu: str | None, arguments: argparse.Namespace) -> bool:
    """Make one run; whether it came to its end."""
    row, *changes = run.split()
    own = folder_of(folder, run)
    own.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(CURVE), str(arguments.config), *arguments.overrides, *changes, "--rows", row]
    command += ["--output", str(own / "curve.json"), "--folder", str(own), "--limit-s", str(arguments.limit_s)]
    command += ["--trl-gpus", gpu or "0", "--trl-python", arguments.trl_python]
    shown = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with (own / "curve.log").open("wb") as log:
        return subprocess.run(command, env={**os.environ, **shown}, stdout=log, stderr=log, check=False).returncode == 0


def make(runs: list[str], arguments: argparse.Namespace) -> None:
    """All runs that are not there, so many at a time."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)

    def work(gpu: str | None) -> None:
        while True:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            has_ended = measure(run, arguments.folder, gpu, arguments)
            print(f"{run}: {'ended' if has_ended else f'see {folder_of(arguments.folder, run)}'}", flush=True)

    places = [gpu for gpu in arguments.gpus or [None] for _ in range(arguments.at_once)]
    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def steps_of(folder: Path, run: str) -> list[dict[str, float]]:
    """The metrics of a run, step by step; empty where it has none."""
    found = sorted(folder_of(folder, run).glob("*/metrics.jsonl"))
    return read_metrics(found[0]) if found else []


def mean(lines: list[dict[str, float]], key: str) -> float:
    """Of a metric over the steps that have it; NaN where none has."""
    values = [line[key] for line in lines if key in line]
    return statistics.fmean(values) if values else float("nan")


def describe(lines: list[dict[str, float]]) -> dict[str, Any]:
    """What one run did."""
    steps = [line for line in lines if line["step"] >= 1]
    skipped = min(10, len(steps) // 2)
    timed = steps[skipped:]
    evaluating = sum(line.get("time/evaluate_s", 0.0) for line in steps[skipped - 1 : -1])
    seconds = timed[-1]["time"] - steps[skipped - 1]["time"] - evaluating
    parts = {name: mean(timed, f"time/{key}") for name, key in PARTS.items()}
    fifth = max(1, len(steps) // 5)
    return {
        "steps": len(steps),
        "samples/s": sum(line.get("batch/sequences", 0.0) for line in timed) / seconds,
        "step": statistics.fmean(line["time/step_s"] for line in timed),
        "spread": statistics.pstdev(line["time/step_s"] for line in timed),
        "staleness": mean(timed, "staleness/mean"),
        "parts": "/".join(f"{value:.2f}" for value in parts.values()),
        "pause": mean(timed, "weight_sync/pause_s") + mean(timed, "weight_sync/transfer_s"),
        "rewards": [round(mean(steps[at : at + fifth], "reward/mean"), 3) for at in range(0, 5 * fifth, fifth)],
        "held out": {
            int(line["step"]): round(line["evaluation/reward"], 3) for line in lines if "evaluation/reward" in line
        },
        "surprise": -mean(steps, "train/logprob") - mean(steps, "train/entropy"),
    }


def type_name_of(run: str) -> str:
    """A run without its seed."""
    row, *changes = run.split()
    return " ".join([row.partition("/")[0], *changes])


def report(runs: list[str], folder: Path) -> None:
    """Print each kind with its seeds below it, then medians."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if len(lines := steps_of(folder, run)) > 3:
            kinds.setdefault(type_name_of(run), []).append(describe(lines))
    for kind, found in kinds.items():
        print(f"\n{kind}")
        for one in found:
            print(
                f"  {one['steps']:3} steps {one['samples/s']:5.0f} samples/s, {one['step']:.2f} +- {one['spread']:.2f} "
                f"s ({'/'.join(PARTS)} {one['parts']}, pause {one['pause']:.3f}), staleness {one['staleness']:.2f}, "
                f"surprise {one['surprise']:+.4f}, rewards {one['rewards']}, held out {one['held out']}"
            )
        evaluated = sorted({step for one in found for step in one["held out"]})
        medians = {
            step: round(statistics.median(scores), 3)
            for step in evaluated
            if (scores := [one["held out"][step] for one in found if step in one["held out"]])
        }
        print(f"  median of {len(found)}: held out {medians}")


def main() -> None:
    """Make the runs, then say what they did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every run")
    parser.add_argument("--rows", nargs="+", required=True, metavar="RUN")
    parser.add_argument("--gpus", nargs="+", help="names in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--at-once", type=int, default=1, help="runs on each GPU, or in all")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of one run")
    parser.add_argument("--trl-python", default=sys.executable)
    arguments = parser.parse_intermixed_args()
    make(arguments.rows, arguments)
    report(arguments.rows, arguments.folder)


if __name__ == "__main__":
    main()
