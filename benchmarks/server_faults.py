"""Faults in a whole run: servers are killed and stopped, the run itself is killed and resumed, and nothing may be lost.

    python tests/servers_on_cpu/make_environment.py sglang
    python benchmarks/server_faults.py [--rounds 2] [--every 20] [--server vllm] [--agent] [section.key=value ...]

The demonstration is trained with two SGLang (or vLLM) servers on the CPU. In turn a server is killed with SIGKILL, a
server is stopped for ten seconds, and the run is killed with SIGKILL and resumed; with `--agent` episodes are those of
an agent of two turns, in two workflow workers, one of which is killed as well. The audit must be clean at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AREAL = [sys.executable, "-m", "areal_core"]
OVERRIDES = [
    "inference_engine.servers={minimum: 2, maximum: 2}",
    "launcher.nodes=2",
    "inference_engine.restarts=100",
    "inference_engine.health_interval_s=0.5",
    "inference_engine.health_timeout_s=2",
    "inference_engine.stream_interval=4",
    "sampling.max_new_tokens=48",
    "checkpoint.every=5",
    "publication.verify_every=3",
    "evaluation=null",
    "steps=100000",
]
STOPPED_S = 10.0
HANG_S = 900.0
"""A wait that is longer has no end; starting two servers on a busy machine takes minutes."""
WINDOW = 5
"""Steps over which throughput is averaged."""
COUNTED = ("servers/pieces", "servers/continued", "servers/failed", "batch/sequences")
KINDS = ("SIGKILL of a server", "SIGSTOP of a server, 10 s", "SIGKILL of the run, resumed", "SIGKILL of a worker")
ENGINES = {"sglang": "max_running_requests", "vllm": "max_num_seqs"}
"""Servers, and what each calls the requests that it works on at a time."""
AGENT = {
    "type": "agents/agent",
    "agent": f"{ROOT}/benchmarks/asks_again.py:solve",
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "max_tokens": 128,
}


@dataclass
class Fault:
    """One fault and what it cost."""

    kind: str
    at: float
    recovery_s: float | None = None


class Run:
    """A run as a user starts it, with a record of when each step was done."""

    def __init__(self, run_dir: Path, server: str, words: list[str]) -> None:
        self.run_dir = run_dir
        self.server = server
        self.words = words
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self._read = 0

    def start(self, *, resume: bool) -> None:
        """Start it, or take it up where its last checkpoint left it."""
        config = str(ROOT / f"tests/servers_on_cpu/{self.server}.yaml")
        first = ["run", config, f"run_dir={self.run_dir}", *self.words]
        again = ["run", "--resume", str(self.run_dir), "--allow-changed-plugins"]
        with (self.run_dir.parent / "output.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*AREAL, *(again if resume else first)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def watch(self, until: float) -> None:
        """Note what comes until then."""
        while time.monotonic() < until:
            self._look()
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(
                    f"the run ended by itself:\n{(self.run_dir.parent / 'output.log').read_text()[-3000:]}"
                )
            time.sleep(0.05)

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Until so many further steps are done."""
        goal, deadline = len(self.seen) + count, time.monotonic() + timeout_s
        while len(self.seen) < goal:
            if time.monotonic() > deadline:
                raise SystemExit(f"no {count} steps within {timeout_s:g} s")
            self.watch(time.monotonic() + 0.1)

    def _look(self) -> None:
        path = self.run_dir / "metrics.jsonl"
        if not path.is_file():
            return
        data = path.read_bytes()
        self._read = min(self._read, len(data))  # a resume takes back the steps behind its checkpoint
        fresh = data[self._read : data.rfind(b"\n") + 1]
        self._read += len(fresh)
        self.seen += [(time.monotonic(), json.loads(line)) for line in fresh.splitlines()]

    def processes(self, name: str) -> list[int]:
        """Process groups of what runs under such names: children of keepers, which have the logs as arguments."""
        assert self.process is not None
        found = []
        for keeper in descendants(self.process.pid):
            with suppress(OSError):
                words = Path(f"/proc/{keeper}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"keeper.py") for word in words) and any(
                    f"/logs/{name}-".encode() in w for w in words
                ):
                    found += children(keeper)
        return found

    def throughput(self, first: int, last: int) -> float:
        """Tokens a second over the steps from one place in the record to another."""
        steps = self.seen[first : last + 1]
        if len(steps) < 2:
            return 0.0
        tokens = sum(metrics.get("batch/tokens", 0.0) for _, metrics in steps[1:])
        return float(tokens / max(steps[-1][0] - steps[0][0], 1e-9))


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Processes that a process and those that it started have started."""
    found = children(pid)
    for child in list(found):
        found += descendants(child)
    return found


def inject(run: Run, kind: str, draw: random.Random) -> Fault:
    """One fault; on return the run goes on, or is on its way to."""
    fault = Fault(kind, time.monotonic())
    assert run.process is not None
    if kind == KINDS[2]:
        run.process.kill()
        run.process.wait()
        time.sleep(2)  # what it started ends with it
        run.start(resume=True)
        return fault
    name = "workflow" if kind == KINDS[3] else "server"
    groups = run.processes(name)
    if not groups:
        raise SystemExit(f"no {name} runs")
    group = draw.choice(groups)
    if kind in (KINDS[0], KINDS[3]):
        os.killpg(group, signal.SIGKILL)
        return fault
    os.killpg(group, signal.SIGSTOP)
    try:
        run.watch(time.monotonic() + STOPPED_S)
    finally:
        with suppress(ProcessLookupError):  # it was given up and ended meanwhile
            os.killpg(group, signal.SIGCONT)
    return fault


def recovery(run: Run, fault: Fault) -> float | None:
    """Seconds from a fault to the end of the first steps at 90 % of the throughput before it; None where it never was.

    The steps are a window, all of them behind the fault; so what is told holds the time of a window even where nothing
    was felt.
    """
    first = sum(when <= fault.at for when, _ in run.seen)
    before = run.throughput(max(first - 1 - 2 * WINDOW, 0), first - 1)
    for last in range(first + WINDOW, len(run.seen)):
        if run.throughput(last - WINDOW, last) >= 0.9 * before:
            return run.seen[last][0] - fault.at
    return None


def rows(run: Run, faults: list[Fault], audit: dict[str, Any]) -> list[tuple[str, str]]:
    """The table."""
    total: Counter[str] = Counter()
    for _, metrics in run.seen:
        total.update({name: metrics.get(name, 0.0) for name in COUNTED})
    table = []
    for kind in KINDS:
        mine = [fault for fault in faults if fault.kind == kind]
        told = [f"{fault.recovery_s:.0f}" if fault.recovery_s is not None else "not seen" for fault in mine]
        table.append((kind, f"{len(mine)}; back at 90 % of throughput after {', '.join(told) or '-'} s"))
    steps = [int(metrics["step"]) for _, metrics in run.seen]
    final = [json.loads(line)["step"] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    doubled = len(final) - len(set(final))
    lost = len(set(range(1, max(final) + 1)) - set(final))
    transitions = (run.run_dir / "logs" / "servers.jsonl").read_text().splitlines()
    mislabelled = sum("labels" in json.loads(line).get("reason", "") for line in transitions)
    skew = max((metrics.get("servers/version_skew", 0.0) for _, metrics in run.seen), default=0.0)
    wrong = max((metrics.get("verify/logprob_difference_max", 0.0) for _, metrics in run.seen), default=0.0)
    return [
        *table,
        ("pieces answered", f"{total['servers/pieces']:.0f}"),
        ("requests trained on", f"{total['batch/sequences']:.0f}"),
        ("continued elsewhere or later", f"{total['servers/continued']:.0f}"),
        ("failed pieces", f"{total['servers/failed']:.0f}"),
        ("steps done, and done again after a resume", f"{len(set(steps))}, {len(steps) - len(set(steps))}"),
        ("steps lost, doubled", f"{lost}, {doubled}"),
        ("answers whose labels could not be right", f"{mislabelled}"),
        ("versions apart between ready servers", f"{skew:.0f}"),
        ("largest log-probability difference to the trainer", f"{wrong:.1e}"),
        ("problems that the audit found", f"{len(audit['problems'])}"),
        ("audit", json.dumps(audit)),
    ]


def main() -> int:
    """Start, disturb, audit, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="faults of each kind")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", choices=ENGINES, default="sglang")
    parser.add_argument("--agent", action="store_true", help="an agent of two turns plays the episodes")
    arguments, overrides = parser.parse_known_args()
    chosen = [*OVERRIDES, f"inference_engine.options.{ENGINES[arguments.server]}=64"]
    if arguments.agent:
        chosen += [f"plugins=[{arguments.server},agents]", f"workflow={json.dumps(AGENT)}", "rewards=[]"]
        chosen += ["rollout.workers=2"]
    kinds = KINDS if arguments.agent else KINDS[:3]
    run = Run(Path(tempfile.mkdtemp(prefix="faults-")) / "run", arguments.server, [*chosen, *overrides])
    draw, faults = random.Random(arguments.seed), []
    run.start(resume=False)
    try:
        run.wait_for_steps(2 * WINDOW, HANG_S)
        settled = len(run.seen)
        run.watch(time.monotonic() + arguments.every / 2)
        before = run.throughput(settled, len(run.seen) - 1)
        for kind in [kind for _ in range(arguments.rounds) for kind in kinds]:
            fault = inject(run, kind, draw)
            faults.append(fault)
            run.wait_for_steps(2 * WINDOW, HANG_S)
            run.watch(fault.at + arguments.every)
            print(f"{kind}: {len(run.seen)} steps so far", flush=True)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
    finally:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    for fault in faults:
        fault.recovery_s = recovery(run, fault)
    done = subprocess.run([*AREAL, "audit", str(run.run_dir), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the audit failed: {done.stdout}{done.stderr}")
    print(f"throughput before the first fault: {before:.0f} tokens a second")
    for name, value in rows(run, faults, json.loads(done.stdout)):
        print(f"{name:52s} {value}")
    known = [fault.recovery_s for fault in faults if fault.recovery_s is not None]
    print(f"{'median seconds to recovery':52s} {statistics.median(known) if known else float('nan'):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
