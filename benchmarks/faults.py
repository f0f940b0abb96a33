"""Faults of every process of a run: when they are noticed, when the next step comes, what is left, whether all adds up.

    python benchmarks/faults.py table [CONFIG] [--plugins grpo] [section.key=value ...]
    python benchmarks/faults.py kills [CONFIG] [--kills 60] [--seed 0] [--drivers 2] [--plugins grpo] [...]
    python benchmarks/clusters.py slurm|ray python benchmarks/faults.py table ... launcher.type=slurm|ray

`table` does one thing to a run at a time, `kills` sends SIGKILL at random moments to processes drawn at random, the
driver among them, after which the run is resumed; with `--drivers 2` two programs want to resume it at once. Each fault
is followed by an audit. `--victims` names others than those of the demonstration: a process of the run, `driver`,
`reward`, `guard:NAME` for its parent, `program:NAME` for what a server's process has started, `node:NAME` for a virtual
node of `clusters.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.driver import ask_driver
from areal_core.runs import RunFolder
from areal_core.runtime.messages import RunStatus, StatusRequest
from areal_core.runtime.process_tree import children, processes_with

if TYPE_CHECKING:
    from collections.abc import Sequence

AREAL = [sys.executable, "-m", "areal_core"]
HANG_S = 900.0
NOTICED = ("was killed", "was lost", "been silent", "been stopped", "going back", "restarted", "starts over", "hangs")
VICTIMS = ("driver", "trainer-0", "controller", "worker-0", "server-0", "reward", "guard:trainer-0", "guard:controller")
STOPPED = ("trainer-0", "worker-0", "program:server-0")
"""Victims that the table also sends SIGSTOP."""


def driving(run_dir: Path) -> RunStatus | None:
    """What the driver says of the run's processes; None where nobody answers."""
    attempt = RunFolder(run_dir).last_attempt
    found = ask_driver(attempt, StatusRequest(), 2.0) if attempt is not None else None
    return found if isinstance(found, RunStatus) else None


def phase(run_dir: Path) -> str:
    """What the trainer is doing, as the run says itself."""
    found = driving(run_dir)
    return found.processes["trainer-0"].phase if found and "trainer-0" in found.processes else "starting"


def parent(pid: int) -> int:
    """Of a process; 0 where it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def descendants(pid: int) -> list[int]:
    """Everything that a process has started, and what these have."""
    own = children(pid)
    return own + [deeper for child in own for deeper in descendants(child)]


def find(run_dir: Path, driver: int, victim: str) -> int:
    """The process of a run that is meant; 0 where it is not there yet, or not any more."""
    if victim == "driver":
        return driver
    kind, _, name = victim.rpartition(":")
    if kind == "node":
        nodes = dict(word.split("=") for word in os.environ["CLUSTER_NODES"].split())
        return int(nodes[name])
    found = driving(run_dir)
    member = "controller" if name == "reward" else name
    if found is None or member not in found.processes or not (pid := here(found.processes[member].pid, run_dir)):
        return 0
    if name == "reward":
        return next((pid for pid in descendants(pid) if "rewards.worker" in _command(pid)), 0)
    if kind == "program":
        return next(iter(children(pid)), 0)
    return parent(pid) if kind == "guard" else pid


def here(pid: int, run_dir: Path) -> int:
    """A process of the run by its number on its node, which may be a namespace of processes; 0 where it is gone."""
    like = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if re.search(rf"^NSpid:.*\t{pid}$", path.read_text(), re.MULTILINE):
                like.append(int(path.parent.name))
    own = processes_of(run_dir).intersection(like)
    return next(iter([*own, *(one for one in like if one == pid)]), 0)


def processes_of(run_dir: Path) -> set[int]:
    """Processes that were started with the token of one of the run's attempts."""
    tokens = [path.read_text() for path in run_dir.glob("attempts/*/token")]
    return {pid for token in tokens for pid in processes_with("AREAL_TOKEN", token)}


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def step_of(run_dir: Path) -> int:
    """Steps in the metrics so far."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0


def audit(run_dir: Path) -> dict[str, object]:
    """The audit's result; ends the program where it is not clean."""
    done = subprocess.run([*AREAL, "audit", str(run_dir), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the audit failed: {done.stdout}{done.stderr}")
    result: dict[str, object] = json.loads(done.stdout)
    return result


def leftovers(run_dir: Path, patience_s: float = 10.0) -> list[int]:
    """Processes of the run, guards and orphans among them, that outlive it by some seconds."""
    deadline = time.monotonic() + patience_s
    while left := sorted(processes_of(run_dir)):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


class Faulty:
    """A run to which something is done.

    Args:
        words: of `areal run`.
        run_dir: its folder.
    """

    def __init__(self, words: list[str], run_dir: Path) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_name("output.log")
        self._words = words
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, drivers: int = 1) -> None:
        """Start the run, or go on with it, and wait for a new step; of several drivers one wins, the others say so."""
        again = ["run", "--resume", str(self.run_dir), "--allow-changes"]
        command = [*AREAL, *(again if step_of(self.run_dir) else [*self._words, f"run_dir={self.run_dir}"])]
        former = step_of(self.run_dir)
        with self.log.open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            started = [subprocess.Popen(command, **streams) for _ in range(drivers)]
        if drivers > 1:
            losers: list[subprocess.Popen[bytes]] = []
            deadline = time.monotonic() + HANG_S
            while len(losers) < drivers - 1 and time.monotonic() < deadline:
                losers = [one for one in started if one.poll() is not None]
                time.sleep(0.05)
            assert [one.returncode for one in losers] == [2] * (drivers - 1), "both drivers have the run"
            started = [one for one in started if one.poll() is None]
        self.process = started[0]
        self.wait_for_step(former)

    def wait_for_step(self, former: int) -> float:
        """Seconds until there is a step after `former` lines of metrics, or fewer lines: the run went back."""
        began = time.monotonic()
        assert self.process is not None
        while step_of(self.run_dir) <= former:
            if self.process.poll() is not None or time.monotonic() - began > HANG_S:
                raise SystemExit(f"no further step: {self.log.read_text()[-3000:]}")
            time.sleep(0.01)
        return time.monotonic() - began

    def disturb(self, victim: str, number: int) -> tuple[float, float]:
        """Send a signal; seconds until it is said, and until the next step. A driver that is killed is resumed."""
        assert self.process is not None
        said, former, began = self.log.stat().st_size, step_of(self.run_dir), time.monotonic()
        if not (pid := find(self.run_dir, self.process.pid, victim)):
            return 0.0, 0.0
        os.kill(pid, number)
        if victim == "driver":
            self.process.wait()
            assert not leftovers(self.run_dir), leftovers(self.run_dir)
            noticed = time.monotonic() - began
            return noticed, -1.0
        noticed = 0.0
        while not noticed and time.monotonic() - began < HANG_S and self.process.poll() is None:
            with self.log.open("rb") as log:
                log.seek(said)
                words = log.read().decode(errors="replace")
            noticed = time.monotonic() - began if any(word in words for word in NOTICED) else 0.0
            if victim == "reward" and step_of(self.run_dir) > former:
                break  # its request fails, and nothing is said
            time.sleep(0.005)
        self.wait_for_step(step_of(self.run_dir))
        return noticed, time.monotonic() - began


def table(run: Faulty, victims: Sequence[str]) -> None:
    """One fault of each kind."""
    run.start()
    for victim in victims:
        for number in (signal.SIGKILL, signal.SIGSTOP) if victim in STOPPED else (signal.SIGKILL,):
            run.wait_for_step(step_of(run.run_dir) + 2)
            noticed, stepped = run.disturb(victim, number)
            if stepped < 0:
                began = time.monotonic()
                run.start()
                stepped = time.monotonic() - began
            audit(run.run_dir)
            print(f"{number.name} {victim:18s} noticed {noticed:6.2f} s  next step {stepped:6.2f} s  clean", flush=True)


def kills(run: Faulty, victims: Sequence[str], count: int, seed: int, drivers: int, longest: float) -> None:
    """SIGKILL at random moments."""
    draw = random.Random(seed)
    run.start()
    for number in range(1, count + 1):
        time.sleep(draw.uniform(0.0, longest))
        victim, seen = draw.choice(victims), phase(run.run_dir)
        _, stepped = run.disturb(victim, signal.SIGKILL)
        if stepped < 0 or (run.process is not None and run.process.poll() is not None):
            run.start(drivers)
        committed = audit(run.run_dir)["committed_step"]
        print(f"kill {number:3d} of {victim:16s} in {seen:10s} committed step {committed}: clean", flush=True)


def main() -> int:
    """Do it, stop the run, and see that nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "kills"])
    parser.add_argument("config", nargs="?")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drivers", type=int, default=1)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds between a step and the next kill, at most")
    parser.add_argument("--victims", nargs="*", default=VICTIMS)
    parser.add_argument("--plugins", default="")
    arguments, overrides = parser.parse_known_args()
    run_dir = Path(tempfile.mkdtemp(prefix="faults-")) / "run"
    words = ["run", *([arguments.config] if arguments.config else []), "steps=100000", "checkpoint.every=2", *overrides]
    words += ["launcher.max_attempts_without_checkpoint=20"]
    words += ["--plugins", arguments.plugins] if arguments.plugins else []
    run = Faulty(words, run_dir)
    if arguments.what == "table":
        table(run, arguments.victims)
    else:
        kills(run, arguments.victims, arguments.kills, arguments.seed, arguments.drivers, arguments.longest)
    subprocess.run([*AREAL, "stop", str(run_dir)], check=False)
    assert not leftovers(run_dir), leftovers(run_dir)
    print(audit(run_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
