"""Hours of a run under faults at random: is memory flat, is the audit clean, is nothing left behind?

    python benchmarks/soak.py [CONFIG] --minutes 120 [--plugins grpo] [--every 45] [section.key=value ...]

For the first half a run meets only faults that it shall live through: processes stopped for seconds and continued,
reward processes killed, other work on the machine, and a full disk where `--folder` lies on a small one. Memory, open
files and threads of each of its processes, its folder and its memory files are noted every ten seconds. In the second
half anything goes: every process is killed, stopped for ever or interrupted; the run ends, is audited and resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kill_and_resume import AREAL, audit, descendants, find, leftovers, phase, step_of

from areal_core.launchers.identity import is_stopped

NAMES = {
    "keeper.py": "keeper",  # whose command line ends with that of the process that it keeps
    "areal_core.runs controller": "controller",
    "areal_core.runs trainer": "trainer",
    "areal_core.launchers.warden": "warden",
    "areal_hf.server": "engine",
    "areal_core.rewards.worker": "reward",
}
ROLES = ("supervisor", "warden", "controller", "trainer", "engine", "reward")
MILD = ("stopped for seconds", "reward killed", "other work", "disk full for seconds")
HARSH = (*MILD, "killed", "stopped for ever", "interrupted")
SAMPLE_S = 10.0
WARM_UP_S = 300.0
"""Of a process, before which growth is loading, compiling and filling caches."""
START_S, END_S = 900.0, 400.0
"""How long a start and an end may take on a busy machine; a process that is stopped for ever is given up after 60 s."""
SMALL_DISK = 4 << 30


@dataclass
class Sample:
    """One process at one moment."""

    age_s: float
    memory_mib: float
    files: int
    threads: int


@dataclass
class Soak:
    """A run, what is done to it, and what is seen."""

    words: list[str]
    run_dir: Path
    draw: random.Random
    process: subprocess.Popen[bytes] | None = None
    began: float = field(default_factory=time.monotonic)
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    disk: list[tuple[float, int, int, int]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)

    def start(self) -> None:
        """Start the run, or go on with it, and wait for its first step."""
        first = ["run", *self.words, f"run_dir={self.run_dir}"]
        again = ["run", "--resume", str(self.run_dir)]
        with (self.run_dir.parent / "output.log").open("ab") as log:
            command = [*AREAL, *(again if self.run_dir.exists() else first)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        steps, deadline = step_of(self.run_dir), time.monotonic() + START_S
        while step_of(self.run_dir) <= steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not start: {self.last_words()}")
            time.sleep(0.2)

    def watch(self, seconds: float) -> bool:
        """Note what the processes take, every few seconds; False as soon as the run has ended."""
        until = time.monotonic() + seconds
        assert self.process is not None
        while time.monotonic() < until:
            self._note()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(min(SAMPLE_S, max(until - time.monotonic(), 0.0)))
                return False
        return True

    def _note(self) -> None:
        assert self.process is not None
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(OSError, ValueError, IndexError):
                folder = Path(f"/proc/{pid}")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                name = next((name for words, name in NAMES.items() if words in command), "")
                name = name or ("supervisor" if pid == self.process.pid else "other")
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
                memory = int(status["VmRSS"].split()[0]) / 1024
                files = len(list((folder / "fd").iterdir()))
                self.samples[name, pid].append(Sample(age, memory, files, int(status["Threads"])))
        shared = sum(size(path) for path in Path("/dev/shm").glob("areal-*"))
        self.disk.append((time.monotonic() - self.began, step_of(self.run_dir), size(self.run_dir), shared))

    def disturb(self, kind: str) -> bool:
        """One fault; whether the run shall have ended by it."""
        assert self.process is not None
        role = self.draw.choice(ROLES)
        victim = self.process.pid if role == "supervisor" else find(self.process.pid, role)
        said = f"{kind}: {role} in {phase(self.run_dir)}"
        match kind:
            case "stopped for seconds":
                seconds = self.draw.uniform(0.5, 20.0)
                os.kill(victim, signal.SIGSTOP)
                self.watch(seconds)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
                said += f", {seconds:.0f} s"
            case "reward killed":
                os.kill(find(self.process.pid, "reward"), signal.SIGKILL)
            case "other work":
                loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
                self.watch(self.draw.uniform(5.0, 30.0))
                for loop in loops:
                    loop.kill()
                    loop.wait()
            case "disk full for seconds":
                with filled(self.run_dir.parent):
                    self.watch(self.draw.uniform(1.0, 10.0))
            case "killed":
                os.kill(victim, signal.SIGKILL)
            case "stopped for ever":
                os.kill(victim, signal.SIGSTOP)
            case "interrupted":
                self.process.send_signal(self.draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        self.faults[kind] += 1
        say(self, said)
        return kind in ("killed", "stopped for ever", "interrupted") and not (
            kind != "interrupted" and role == "reward"
        )

    def ended(self, *, expected: bool) -> None:
        """The run has ended, or will: look at what it left, and go on with it."""
        assert self.process is not None
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            # A supervisor that is stopped for ever is what its user sees; the user ends it.
            if not is_stopped(self.process.pid):
                raise SystemExit(f"the run has not ended within {END_S:g} s: {self.last_words()}") from None
            self.process.kill()
            code = self.process.wait()
        self.exits[code] += 1
        if left := leftovers(self.run_dir):
            raise SystemExit(f"left behind: {left}")
        committed = audit(self.run_dir)["committed_step"]
        say(self, f"ended with {code}{'' if expected else ' UNEXPECTEDLY'}, audit clean, committed step {committed}")
        if not expected:
            say(self, self.last_words())
        self.start()

    def last_words(self) -> str:
        """The end of what the run printed."""
        return (self.run_dir.parent / "output.log").read_text(errors="replace")[-2000:]


class filled:  # noqa: N801 - used as a statement
    """A disk without a free byte, while inside."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def __enter__(self) -> None:
        with suppress(OSError), self._ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def __exit__(self, *_: object) -> None:
        self._ballast.unlink()


def size(folder: Path) -> int:
    """Bytes below a folder."""
    total = 0
    for path, _, names in os.walk(folder):  # what goes meanwhile is passed over
        for name in names:
            with suppress(OSError):
                total += Path(path, name).stat().st_size
    return total


def say(soak: Soak, text: str) -> None:
    """A line with the minute and the step."""
    print(f"{(time.monotonic() - soak.began) / 60:6.1f} min  step {step_of(soak.run_dir):5d}  {text}", flush=True)


def slope(samples: list[Sample]) -> float | None:
    """Growth in MiB an hour behind the warm-up, by least squares; None where a process did not live long enough."""
    late = [sample for sample in samples if sample.age_s > WARM_UP_S]
    if len(late) < 30:
        return None
    fit = statistics.linear_regression([one.age_s for one in late], [one.memory_mib for one in late])
    return fit.slope * 3600


def table(soak: Soak) -> list[str]:
    """What was seen, by role: the process that lived longest, and all."""
    lines = ["| process | how many | longest life, min | MiB at 5 min, at its end | MiB/h | files | threads |"]
    lines.append("|---|---|---|---|---|---|---|")
    for role in sorted({role for role, _ in soak.samples}):
        lives = [samples for (name, _), samples in soak.samples.items() if name == role]
        longest = max(lives, key=lambda samples: samples[-1].age_s - samples[0].age_s)
        warm = next((one for one in longest if one.age_s > WARM_UP_S), longest[-1])
        grown = slope(longest)
        files, threads = ([getattr(one, name) for one in longest] for name in ("files", "threads"))
        lines.append(
            f"| {role} | {len(lives)} | {longest[-1].age_s / 60:.0f} | {warm.memory_mib:.0f}, "
            f"{longest[-1].memory_mib:.0f} | {'' if grown is None else f'{grown:+.1f}'} | "
            f"{min(files)} to {max(files)} | {min(threads)} to {max(threads)} |"
        )
    lines += ["", "| minute | step | run folder, MiB | memory files, MiB |", "|---|---|---|---|"]
    for minute, step, disk, shared in soak.disk[:: max(1, len(soak.disk) // 12)]:
        lines.append(f"| {minute / 60:.0f} | {step} | {disk / 2**20:.1f} | {shared / 2**20:.1f} |")
    return lines


def main() -> int:
    """Start, disturb, audit, resume; then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--plugins", default="grpo")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=45.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the run's folder shall lie, such as a small disk")
    arguments, overrides = parser.parse_known_args()
    words = [*([arguments.config] if arguments.config else []), "--plugins", arguments.plugins, "steps=1000000"]
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder))
    # A program that was started in the background, or by nohup, would have its runs ignore what shall end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    soak = Soak([*words, *overrides], folder / "run", random.Random(arguments.seed))
    is_small = shutil.disk_usage(folder).total < SMALL_DISK
    soak.start()
    try:
        while (now := time.monotonic() - soak.began) < arguments.minutes * 60:
            if not soak.watch(soak.draw.expovariate(1 / arguments.every)):
                soak.ended(expected=False)
                continue
            kinds = MILD if now < arguments.minutes * 30 else HARSH
            kind = soak.draw.choice([one for one in kinds if is_small or "disk" not in one])
            if soak.disturb(kind):
                soak.ended(expected=True)
    except KeyboardInterrupt:
        say(soak, "the soak is ended early")
    finally:
        if soak.process is not None and soak.process.poll() is None:
            soak.process.send_signal(signal.SIGINT)
            try:
                soak.exits[soak.process.wait(END_S)] += 1
            finally:
                soak.process.kill()
    print("\n".join(table(soak)))
    print(f"faults: {dict(soak.faults)}; exits: {dict(soak.exits)}; left behind: {leftovers(soak.run_dir)}")
    print(f"audit: {json.dumps(audit(soak.run_dir))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
