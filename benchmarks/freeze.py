"""Stop each process of a run for ever, in whatever phase it is, and see that the run says so and ends or goes on.

    python benchmarks/freeze.py [CONFIG] [--plugins grpo] [--cases 24] [--at-once 3] [section.key=value ...]

Each case is a run of its own. A process is stopped with SIGSTOP and never continued; noted are the seconds until the
run names it, and until the run has ended by itself, or, where the process can be replaced, has made three more steps.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kill_and_resume import AREAL, audit, find, leftovers, phase, step_of

ROLES = ("supervisor", "warden", "controller", "trainer", "engine", "reward")
NAMES = {"trainer": "trainer-0", "engine": "hf", "reward": "reward-0", "warden": "the node"}
"""As the run calls them."""
START_S, END_S = 600.0, 400.0


@dataclass
class Case:
    """A process that is stopped, and what came of it."""

    role: str
    delay_s: float
    phase: str = ""
    told_s: float | None = None
    ended_s: float | None = None
    went_on_s: float | None = None
    outcome: str = ""


def play(case: Case, words: list[str], folder: Path) -> Case:
    """One run: start it, stop the process, wait for what comes."""
    run_dir, output = folder / "run", folder / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*AREAL, "run", *words, f"run_dir={run_dir}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S
        while step_of(run_dir) < 2:
            if process.poll() is not None or time.monotonic() > deadline:
                case.outcome = f"did not start: {output.read_text()[-500:]}"
                return case
            time.sleep(0.05)
        time.sleep(case.delay_s)
        victim = process.pid if case.role == "supervisor" else find(process.pid, case.role)
        case.phase, before, steps = phase(run_dir), output.stat().st_size, step_of(run_dir)
        os.kill(victim, signal.SIGSTOP)
        _watch(case, process, run_dir, output, before, steps)
    finally:
        process.kill()
        process.wait()
    case.outcome += f"; left behind: {left}" if (left := leftovers(run_dir)) else ""
    case.outcome += f"; audit {'clean' if not audit(run_dir)['problems'] else 'NOT clean'}"
    return case


def _watch(case: Case, process: subprocess.Popen[bytes], run_dir: Path, output: Path, before: int, steps: int) -> None:
    began = time.monotonic()
    while (since := time.monotonic() - began) < END_S:
        said = output.read_bytes()[before:].decode(errors="replace")
        if case.told_s is None and NAMES.get(case.role, case.role) in said:
            case.told_s = since
        if case.role == "supervisor":
            # Nobody is left who could say anything: its processes must end without it, once its lease is over.
            if not [line for line in leftovers(run_dir) if not line.startswith(f"{process.pid} ")]:
                case.ended_s, case.outcome = time.monotonic() - began, "its processes ended without it"
                return
        elif process.poll() is not None:
            words = next((line for line in said.splitlines() if line.startswith("areal: error")), said[-200:])
            case.ended_s, case.outcome = since, f"exit {process.returncode}: {words[:160]}"
            return
        elif case.role == "reward" and step_of(run_dir) >= steps + 3 and case.told_s is not None:
            case.went_on_s, case.outcome = since, "went on"
            return
        time.sleep(0.2)
    case.outcome = f"NOTHING within {END_S:g} s"


def seconds(value: float | None) -> str:
    """As it stands in the table."""
    return "" if value is None else f"{value:.0f}"


def main() -> int:
    """Play all cases, a few at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--plugins", default="grpo")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    words = [*([arguments.config] if arguments.config else []), "--plugins", arguments.plugins, "steps=1000000"]
    words += ["evaluation.every=5", "checkpoint.every=5", "publication.verify_every=2", *overrides]
    draw, roles = random.Random(arguments.seed), arguments.roles.split(",")
    cases = [Case(roles[number % len(roles)], draw.uniform(0.0, 4.0)) for number in range(arguments.cases)]
    top = Path(tempfile.mkdtemp(prefix="freeze-"))
    folders = [top / str(number) for number in range(len(cases))]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        done = list(pool.map(lambda case, folder: play(case, words, folder), cases, folders))
    print("| stopped | in phase | told after, s | ended after, s | went on after, s | outcome |")
    print("|---|---|---|---|---|---|")
    for case in sorted(done, key=lambda case: (ROLES.index(case.role), case.phase)):
        print(
            f"| {case.role} | {case.phase} | {seconds(case.told_s)} | {seconds(case.ended_s)} | "
            f"{seconds(case.went_on_s)} | {case.outcome} |"
        )
    return int(any("NOT" in case.outcome or "left behind" in case.outcome for case in done))


if __name__ == "__main__":
    sys.exit(main())
