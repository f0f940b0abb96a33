"""The demonstration, unchanged but for what launches it: held-out scores, time to the first step, audits.

    python benchmarks/launchers.py [--only local ray ...] [--seeds 1 2] [--out TABLE.json]

Rows: `local`; `nodes`, three of the local launcher's; `ray`, three virtual nodes of true Ray; `slurm`, three of true
SLURM; `torchrun`, three agents on this machine; `join`, three nodes by hand. What is not installed is told and left
out. Needs root, as the clusters of the tests do. Some two minutes a row and seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusters import AREAL, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG_S = 1800.0
NODES, RANKS = "launcher.nodes=3", "launcher.trainer_processes=2"
Words = list[str]


def demonstration(run_dir: Path, seed: int, *launcher: str) -> Words:
    """What follows `areal run`."""
    return ["--plugins", "grpo", f"run_dir={run_dir}", f"seed={seed}", *launcher]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Of all steps that are written."""
    try:
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []


@contextmanager
def started(commands: list[Words], folder: Path, environment: dict[str, str] | None = None) -> Iterator[list[Any]]:
    """These programs, ended when the block ends."""
    with (folder / "output").open("ab") as out:
        running = [
            subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
            for words in commands
        ]
        try:
            yield running
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait(120)


def run_programs(commands: list[Words], run_dir: Path, environment: dict[str, str] | None = None) -> float:
    """Run these to their ends; seconds until the first step was written."""
    began, first = time.monotonic(), 0.0
    with started(commands, run_dir.parent, environment) as running:
        while any(process.poll() is None for process in running):
            if time.monotonic() - began > HANG_S:
                raise TimeoutError(f"no end within {HANG_S:g} s: {(run_dir.parent / 'output').read_text()[-3000:]}")
            if not first and metrics(run_dir):
                first = time.monotonic() - began
            time.sleep(0.1)
        codes = [process.returncode for process in running]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(run_dir.parent / 'output').read_text()[-3000:]}")
    return first


def local(run_dir: Path, seed: int) -> float:
    """Processes of this machine."""
    return run_programs([[*AREAL, "run", *demonstration(run_dir, seed)]], run_dir)


def nodes(run_dir: Path, seed: int) -> float:
    """Several wardens of this machine."""
    return run_programs([[*AREAL, "run", *demonstration(run_dir, seed, NODES, RANKS)]], run_dir)


def ray(run_dir: Path, seed: int) -> float:
    """A head and two nodes; the placement group takes three."""
    cluster = load("tests/integration/conftest.py").RayCluster()
    try:
        cluster.repair()
        where = [f"launcher.address={cluster.address}", f"launcher.host={cluster.host}"]
        words = demonstration(run_dir, seed, "launcher.type=ray", *where, NODES, RANKS)
        return run_programs([[*AREAL, "run", *words]], run_dir, cluster.environment)
    finally:
        cluster.close()


def slurm(run_dir: Path, seed: int) -> float:
    """Submitted; the seconds in the queue are counted."""
    module = load("plugins/areal_slurm/tests/conftest.py")
    if reason := module.why_no_slurm():
        raise RuntimeError(reason)
    (run_dir.parent / "cluster").mkdir()
    cluster = module.Cluster(run_dir.parent / "cluster")
    first = 0.0
    try:
        cluster.start()
        cluster.environment["AREAL_CACHE"] = os.environ.get("AREAL_CACHE", str(Path.home() / ".cache" / "areal"))
        began = time.monotonic()
        words = demonstration(run_dir, seed, "launcher.type=slurm", RANKS)
        said = cluster.areal("slurm", "submit", *words, "--nodes=3", folder=run_dir.parent)
        job = re.findall(r"^job +(\d+)$", said, re.MULTILINE)[0]
        while cluster.job(job)["JobState"] in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}:
            if not first and metrics(run_dir):
                first = time.monotonic() - began
            time.sleep(0.2)
        cluster.wait_for_job(job, ["COMPLETED"], run_dir / "slurm.log")
        return first
    finally:
        cluster.close()


def torchrun(run_dir: Path, seed: int) -> float:
    """Three agents, one process each."""
    meeting = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1",
             "--rdzv-backend=c10d", meeting, "-m", "areal_core", "join", str(run_dir)]  # fmt: skip
    return run_programs([[*agent, "--plugins", "grpo", f"seed={seed}", RANKS]] * 3, run_dir)


def join(run_dir: Path, seed: int) -> float:
    """The run waits, and three nodes come."""
    words = demonstration(run_dir, seed, "launcher.type=joined", NODES, RANKS)
    return run_programs([[*AREAL, "run", *words], *([[*AREAL, "join", str(run_dir)]] * 3)], run_dir)


def free_port() -> int:
    """On loopback, a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ROWS: dict[str, Callable[[Path, int], float]] = {
    "local": local, "nodes": nodes, "ray": ray, "slurm": slurm, "torchrun": torchrun, "join": join,
}  # fmt: skip


def main() -> None:
    """One row after another; the table is written as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--out", type=Path, help="rows as JSON")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="areal-launchers-", dir="/tmp"))
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    print("| launcher | seed | first step s | whole run s | held-out before | after | steps | audit |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    try:
        for name in arguments.only:
            for seed in arguments.seeds:
                folder = base / f"{name}-{seed}"
                folder.mkdir()
                run_dir, began = folder / "run", time.monotonic()
                try:
                    first = ROWS[name](run_dir, seed)
                except (RuntimeError, TimeoutError, AssertionError) as error:
                    print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                    continue
                lines = metrics(run_dir)
                scores = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
                audit = subprocess.run([*AREAL, "audit", str(run_dir)], capture_output=True, check=False).returncode
                took, last = time.monotonic() - began, lines[-1]["step"]
                found = "clean" if not audit else f"exit code {audit}"
                row = [name, seed, f"{first:.0f}", f"{took:.0f}", f"{scores[0]:.3f}", f"{scores[-1]:.3f}", last, found]
                rows.append(row)
                print("|", " | ".join(map(str, row)), "|", flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
