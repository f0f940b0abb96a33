"""The demonstration, unchanged but for what launches it: held-out scores, seconds to the first step, audits.

    python benchmarks/launchers.py [--only local ray ...] [--seeds 1 2]

Rows: `local`; `ray` and `slurm`, three virtual nodes of the true ones (needs root); `torchrun`, three agents on this
machine; `node`, three agents by hand. Beside `local` two ranks. Where a scheduler names the run's processes, its own
list of them is printed. About a minute a row and seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from clusters import cluster

from areal_core.runs import RunFolder
from areal_core.runtime.network import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

HANG_S = 1800.0
AREAL = [sys.executable, "-m", "areal_core"]
NODES, RANKS, HERE = "launcher.nodes=3", "launcher.trainer_processes=2", "launcher.host=127.0.0.1"
LISTS = {
    "ray": [sys.executable, "-m", "ray.scripts.scripts", "list", "actors", "--filter", "state=ALIVE"],
    "slurm": ["squeue", "--steps", "--noheader", "--format=%.9i %j"],
}
"""What the schedulers' own commands are that list processes by name."""


def programs(row: str, run_dir: Path, seed: int, environment: Mapping[str, str]) -> list[list[str]]:
    """The programs of a row."""
    words = ["--plugins", "grpo", f"seed={seed}"]
    run = [*AREAL, "run", *words, f"run_dir={run_dir}"]
    agent = [*AREAL, "node", str(run_dir)]
    if row == "ray":
        address = environment["RAY_ADDRESS"]
        where = [f"launcher.address={address}", f"launcher.host={address.partition(':')[0]}"]
        return [[*run, "launcher.type=ray", *where, NODES, RANKS]]
    if row == "slurm":
        return [[*run, "launcher.type=slurm", RANKS]]
    if row == "torchrun":
        meeting = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"]
        return [[*torchrun, "--rdzv-backend=c10d", meeting, "-m", *agent[2:], *words, RANKS, HERE]] * 3
    if row == "node":
        return [[*run, "launcher.type=external", NODES, RANKS, HERE], *[agent] * 3]
    return [run]


def run_row(row: str, seed: int, folder: Path) -> list[object]:
    """Run the demonstration once; what the table says of it."""
    run, run_dir, environment = RunFolder(folder / "run"), folder / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    (folder / "cluster").mkdir(parents=True)
    where = cluster(row, folder / "cluster") if row in LISTS else nullcontext(([], environment))
    with where as (before, environment), (folder / "output").open("wb") as out:
        began, first, listed = time.monotonic(), 0.0, ""
        started = [
            subprocess.Popen([*before, *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                             stdout=out, stderr=out)
            for command in programs(row, run_dir, seed, environment)
        ]  # fmt: skip
        while any(process.poll() is None for process in started):
            assert time.monotonic() - began < HANG_S, (folder / "output").read_text()[-3000:]
            if not first and run.read_metrics():
                first = time.monotonic() - began
                if row in LISTS:
                    listed = subprocess.run(
                        LISTS[row], env=environment, capture_output=True, text=True, check=True
                    ).stdout
            time.sleep(0.1)
        took, codes = time.monotonic() - began, [process.returncode for process in started]
        assert not any(codes), f"exit codes {codes}: {(folder / 'output').read_text()[-3000:]}"
    if listed:
        print(listed, file=sys.stderr, flush=True)
    lines = run.read_metrics()
    scores = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
    audit = subprocess.run([*AREAL, "audit", str(run_dir)], capture_output=True, check=False).returncode
    found = "clean" if not audit else f"exit code {audit}"
    return [row, seed, f"{first:.0f}", f"{took:.0f}", f"{scores[0]:.3f}", f"{scores[-1]:.3f}", lines[-1]["step"], found]


def main() -> None:
    """One row after another."""
    rows = ["local", "ray", "slurm", "torchrun", "node"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=rows, choices=rows)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    arguments = parser.parse_args()
    print("| launcher | seed | first step s | whole run s | held-out before | after | steps | audit |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for row in arguments.only:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory(prefix="launchers-", dir="/tmp") as folder:
                print("|", " | ".join(map(str, run_row(row, seed, Path(folder)))), "|", flush=True)


if __name__ == "__main__":
    main()
