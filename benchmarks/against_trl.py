"""Samples trained on per second, steps 20 to 60 of the demonstration, against TRL's GRPOTrainer on the same cores.

    python benchmarks/against_trl.py [--rounds 3] [--trl-threads 1 2] [--without-compiled] [section.key=value ...]

TRL goes into an environment of its own below the cache folder. Runs are interleaved; medians are printed, the mean
reward of each third of the run, and the held-out score (two samples a problem). Both sides have the same model,
problems, optimizer, warm-up and constant learning rate. areal's `max_staleness` is the preset's (1), the decoupled
correction is on; `rollout.max_staleness=0` compares learning at equal samples. Its compiled row needs a C++ compiler;
what compiling takes lies before step 20.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from areal_grpo.demonstration.model import AdditionModel
from areal_grpo.demonstration.settings import AdditionModelSettings

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("AREAL_CACHE", Path.home() / ".cache" / "areal"))
TRL = "trl==1.16.0"


def trl_python() -> Path:
    """The interpreter of TRL's environment, made if it is not there."""
    environment = CACHE / "benchmark-trl"
    python = environment / "bin" / "python"
    if not (environment / "complete").is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, TRL, "datasets"], check=True)
        (environment / "complete").touch()
    return python


def run_trl(python: Path, model: Path, threads: int, seed: int, steps: int) -> dict[str, float]:
    """One run of TRL."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        program = [str(python), str(ROOT / "benchmarks/trl_program.py"), str(model), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*program, str(threads), str(seed), str(steps)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
        result = json.loads(output.read_text())
        return result | thirds(result.pop("rewards"))


def thirds(rewards: list[float]) -> dict[str, float]:
    """Mean reward of each third of a run's steps."""
    size = len(rewards) // 3
    return {f"reward_{third + 1}": statistics.fmean(rewards[third * size :][:size]) for third in range(3)}


def run_areal(model: Path, seed: int, steps: int, *words: str) -> dict[str, float]:
    """One run of the preset; the rate without the evaluations in between."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "areal_core", "run", "--plugins", "grpo", f"run_dir={run}", f"seed={seed}"]
        command += [f"steps={steps}", "model.source=null", f"model.path={model}", "evaluation.every=1000"]
        command += ["train_engine.schedule=constant", *words]  # as TRL's; the preset's decays to 0
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines}
    timed = [line for line in lines if 20 < line["step"] < steps]
    last = max(line["step"] for line in timed)
    return {
        "samples_per_s": sum(line["batch/sequences"] for line in timed) / (times[last] - times[20]),
        "held_out": lines[-1]["evaluation/reward"],
        "staleness": statistics.fmean(line["staleness/mean"] for line in timed),
        **thirds([line["reward/mean"] for line in lines if "reward/mean" in line]),
        "train_only": sum(line["batch/sequences"] for line in timed) / sum(line["time/train_s"] for line in timed),
    }


def main() -> None:
    """Interleave, and print every run and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--without-compiled", action="store_true")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1, 2])
    arguments, words = parser.parse_known_args()
    model = AdditionModel(AdditionModelSettings()).prepare(CACHE)
    python = trl_python()
    results: dict[str, list[dict[str, float]]] = {}
    for seed in range(1, arguments.rounds + 1):
        sides = {
            "areal": lambda seed=seed: run_areal(model, seed, arguments.steps, *words),
            "areal, compiled": lambda seed=seed: run_areal(
                model, seed, arguments.steps, "train_engine.compile=true", *words
            ),
        }
        if arguments.without_compiled:
            del sides["areal, compiled"]
        for threads in arguments.trl_threads:
            sides[f"TRL, {threads} thread(s)"] = lambda seed=seed, threads=threads: run_trl(
                python, model, threads, seed, arguments.steps
            )
        for name, run in sides.items():
            result = run()
            results.setdefault(name, []).append(result)
            print(f"seed {seed}  {name:16s} " + "  ".join(f"{k} {v:,.3f}" for k, v in result.items()), flush=True)
    medians = {name: statistics.median(r["samples_per_s"] for r in runs) for name, runs in results.items()}
    for name, runs in results.items():
        means = {
            key: round(statistics.fmean(run[key] for run in runs), 3)
            for key in runs[0]
            if key.startswith(("reward", "held"))
        }
        print(f"{name}: means {means}")
    best = max(value for name, value in medians.items() if name.startswith("TRL"))
    print({name: round(value, 1) for name, value in medians.items()})
    for name in [name for name in medians if name.startswith("areal")]:
        print(f"{name}, over TRL at its best thread count: {medians[name] / best:.2f}x")


if __name__ == "__main__":
    main()
