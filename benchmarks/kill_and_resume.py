"""Kill a run with SIGKILL at random moments, audit it after each, resume it, and see that nothing was lost.

    python benchmarks/kill_and_resume.py [CONFIG] [--kills 30] [--plugins grpo] [section.key=value ...]

With `--deterministic` an uninterrupted run is made as well, and the parameters of both must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_core.messages.processes import Owner, WhoOwns
from areal_core.runs import RunFolder, ask_owner

AREAL = [sys.executable, "-m", "areal_core"]
COMMANDS = {"warden": "launchers.warden", "engine": "areal_hf.server", "reward": "rewards.worker", "server": "--port"}
"""A word in the command of a process of each role, where it is not the role's name."""
REPLACED = {"reward", "server"}


def phase(run_dir: Path) -> str:
    """What the trainer is doing, as the run says itself."""
    epoch = RunFolder(run_dir).last_attempt
    owner = ask_owner(epoch, WhoOwns(), 2.0) if epoch is not None else None
    return str(owner.phases.get("trainer-0", "starting")) if isinstance(owner, Owner) else "starting"


def killed(words: list[str], run_dir: Path, after_s: float, victim: str) -> tuple[str, str] | None:
    """Start, wait, kill; whom, and the phase that the trainer was in, or None where the run was done before."""
    process = subprocess.Popen([*AREAL, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first_step = step_of(run_dir)
    deadline = time.monotonic() + 120
    while process.poll() is None and step_of(run_dir) == first_step and time.monotonic() < deadline:
        time.sleep(0.01)  # moments are drawn from the working part of a run, not from its start
    try:
        _, errors = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        seen = phase(run_dir)
        pid = process.pid if victim == "supervisor" else find(process.pid, victim)
        os.kill(pid, signal.SIGKILL)
        if pid == process.pid:
            victim = "supervisor"
        if victim in REPLACED:  # the run goes on: something else must end it
            time.sleep(after_s)
            process.kill()
        process.communicate(timeout=120)
        return victim, seen
    if process.returncode:
        raise SystemExit(f"the run failed instead of being killed:\n{errors.decode()}")
    return None


def find(supervisor: int, victim: str) -> int:
    """The process of a run that is to be killed; the supervisor where it is not there (yet, or any more)."""
    words = COMMANDS.get(victim, victim)
    for pid in descendants(supervisor):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if words in command and "keeper.py" not in command:
                return pid
    return supervisor


def descendants(pid: int) -> list[int]:
    """Everything that a process has started, and what these have."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.parent.name))
    return children + [deeper for child in children for deeper in descendants(child)]


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


def leftovers(run_dir: Path) -> list[str]:
    """Processes of the run that outlived the kill by ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        done = subprocess.run(["pgrep", "-fa", str(run_dir)], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if "pgrep" not in line and "kill_and_resume" not in line]
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)


def main() -> int:
    """Kill, audit and resume until the run is done or the kills are used up; then finish it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plugins", default="")
    parser.add_argument(
        "--longest", type=float, default=2.0, help="seconds of work after which a kill comes at the latest"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--victims", default="supervisor", help="drawn from: supervisor,warden,controller,trainer,engine,reward,server"
    )
    arguments, overrides = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    run_dir = folder / "run"
    words = ["run", *([arguments.config] if arguments.config else []), *overrides]
    words += ["--plugins", arguments.plugins] if arguments.plugins else []
    words += ["deterministic=true", "rollout.max_staleness=0"] if arguments.deterministic else []
    draw, phases, victims, kills = random.Random(arguments.seed), [], [], 0
    command = [*words, f"run_dir={run_dir}"]
    while kills < arguments.kills:
        victim = draw.choice(arguments.victims.split(","))
        seen = killed(command, run_dir, draw.uniform(0.0, arguments.longest), victim)
        if seen is None:
            break
        kills += 1
        victims.append(seen[0])
        phases.append(seen[1])
        assert not leftovers(run_dir), leftovers(run_dir)
        result = audit(run_dir)
        print(
            f"kill {kills:3d} of {seen[0]:10s} in {seen[1]:10s} committed step {result['committed_step']:4d}: clean",
            flush=True,
        )
        command = ["run", "--resume", str(run_dir), "--allow-changed-plugins"]
    if kills == arguments.kills:
        subprocess.run([*AREAL, *command], check=True, stdout=subprocess.DEVNULL)
    counts = [{name: found.count(name) for name in sorted(set(found))} for found in (victims, phases)]
    print(f"{kills} kills: {counts[0]}, in {counts[1]}; {audit(run_dir)}")
    if arguments.deterministic:
        whole = folder / "whole"
        subprocess.run([*AREAL, *words, f"run_dir={whole}"], check=True, stdout=subprocess.DEVNULL)
        same = (run_dir / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
        print(f"parameters equal bit for bit: {same}")
        return 0 if same else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
