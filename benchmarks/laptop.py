"""What the demonstration weighs here: its start, its processes, its memory, its steps; two checkouts in turns.

    python benchmarks/laptop.py [--before CHECKOUT] [--rounds 3] [--steps 60]

`--before` is another checkout of this repository (`git worktree add`), run with this one's environment. Seconds to the
first step count from the command; processes and memory (PSS, so that shared pages are counted once) are those of the
command and all its descendants after step 10; a step's median and its CPU seconds are those from step 20 to the last.
The runs are ended behind their last step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from faults import descendants

HERE = Path(__file__).parents[1]
HANG_S = 600.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """Of the processes that live, and of the children that these have waited for."""
    total = 0
    for pid in [root, *descendants(root)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / TICKS


def memory_mb(root: int) -> tuple[int, float]:
    """How many processes there are, and their PSS."""
    sizes = []
    for pid in [root, *descendants(root)]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            sizes += [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return len(sizes), sum(sizes) / 1024


def run(checkout: Path, folder: Path, steps: int) -> dict[str, float]:
    """One run of a checkout."""
    sources = [checkout, *sorted(checkout.glob("plugins/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
    words = ["run", "--plugins", "grpo", f"run_dir={folder / 'run'}", "steps=100000", "evaluation=null"]
    lines = folder / "run" / "metrics.jsonl"
    folder.mkdir()
    with (folder / "output").open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_core", *words],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )

        def reach(step: int) -> None:
            while not lines.is_file() or lines.read_text().count("\n") < step:
                if process.poll() is not None or time.monotonic() - began > HANG_S:
                    raise SystemExit(f"no step {step}: {(folder / 'output').read_text()[-3000:]}")
                time.sleep(0.01)

        try:
            reach(1)
            first = time.monotonic() - began
            reach(10)
            processes, memory = memory_mb(process.pid)
            reach(20)
            spent = cpu_seconds(process.pid)
            reach(steps)
            spent = cpu_seconds(process.pid) - spent
        finally:
            process.terminate()
            process.wait(60)
    times = [json.loads(line)["time"] for line in lines.read_text().splitlines()[19:steps]]
    return {
        "first step s": first,
        "processes": processes,
        "PSS MB": memory,
        "step s": statistics.median(later - former for former, later in pairwise(times)),
        "CPU s a step": spent / (steps - 20),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    checkouts = {"before": given.before.resolve()} if given.before else {}
    checkouts["now"] = HERE
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as base:
        for number in range(given.rounds):
            for name, checkout in checkouts.items():
                found[name].append(run(checkout, Path(base) / f"{name}-{number}", given.steps))
                print(name, json.dumps({key: round(value, 3) for key, value in found[name][-1].items()}), flush=True)
    print("medians")
    for name, rounds in found.items():
        print(name, {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]})
