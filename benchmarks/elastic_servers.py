"""What a server costs and brings that comes with a node in the middle of a run, and goes with it.

    python benchmarks/elastic_servers.py [KEY=VALUE ...]

A run with true SGLang servers on the CPU (`tests/servers_on_cpu`), of which there may be one to two. It has one node,
with one server. When it is under way a second node comes, and with it a second server; after a while the node is told
to go. The table says what became of the requests, and what was generated before, with and after the second server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_core.messages import Credentials

ROOT = Path(__file__).parents[1]
AREAL = [sys.executable, "-m", "areal_core"]
OVERRIDES = [
    "inference_engine.servers={minimum: 1, maximum: 2}",
    "inference_engine.health_timeout_s=120",
    "evaluation=null",
    "steps=100000",
]
HANG_S = 900.0
STEPS = 12
"""Of each of the three parts."""


class Run:
    """A run as a user starts it, and a node that joins it."""

    def __init__(self, run_dir: Path, words: list[str]) -> None:
        self.run_dir = run_dir
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = (run_dir.parent / "output.log").open("ab")
        config = str(ROOT / "tests/servers_on_cpu/sglang.yaml")
        self.process = self._start([*AREAL, "run", config, f"run_dir={run_dir}", *words], {})

    def _start(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, env={**self.environment, **more}, stdout=self._log, stderr=self._log)

    def join(self, name: str) -> subprocess.Popen[bytes]:
        """A further node: a warden with the run's token."""
        epoch = sorted((self.run_dir / "attempts").iterdir())[-1]
        address = json.loads((epoch / "owner.json").read_text())["address"]
        told = Credentials((epoch / "token").read_text(), int(epoch.name)).as_environment()
        command = [sys.executable, "-m", "areal_core.launchers.warden", address, "60"]
        return self._start(command, {**told, "AREAL_NODE": name})

    def steps(self) -> list[dict[str, Any]]:
        """Lines of metrics so far."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def state(self, server: str) -> str:
        """Where a server is in its life."""
        path = self.run_dir / "logs" / "servers.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return next((entry["state"] for entry in reversed(entries) if entry["server"] == server), "")

    def wait(self, what: str, condition: Any) -> None:
        """Until something is so; ends this program where the run ends, or it takes too long."""
        deadline = time.monotonic() + HANG_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                told = (self.run_dir.parent / "output.log").read_text()[-3000:]
                raise SystemExit(f"waited in vain for {what}:\n{told}")
            time.sleep(0.1)

    def go_on(self) -> list[dict[str, Any]]:
        """The next steps; the first of them began before, and is left out."""
        first = len(self.steps())
        self.wait(f"{STEPS} steps", lambda: len(self.steps()) > first + STEPS)
        return self.steps()[first + 1 :]

    def audit(self) -> dict[str, Any]:
        """Of the run as it is now."""
        done = subprocess.run(
            [*AREAL, "audit", str(self.run_dir), "--json"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the audit failed: {done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def row(name: str, steps: list[dict[str, Any]], audit: dict[str, Any]) -> str:
    """A part of the run as a line of the table."""
    seconds = sum(step["time/step_s"] for step in steps)
    tokens = sum(step["batch/tokens"] for step in steps)
    counts = [sum(step.get(key, 0.0) for step in steps) for key in ("batch/sequences", "servers/continued")]
    lost = sum(step.get("episodes/failed", 0.0) for step in steps)
    under_way = audit["groups"].get("running", 0) + audit["groups"].get("issued", 0)
    cells = [steps[-1]["servers/ready"], under_way, *counts, lost, tokens / seconds]
    return f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |"


def main() -> int:
    """Run, let a node come and go, audit, and print the table."""
    run = Run(Path(tempfile.mkdtemp(prefix="elastic-")) / "run", [*OVERRIDES, *sys.argv[1:]])
    node = None
    try:
        run.wait("the first steps", lambda: len(run.steps()) >= 3)
        parts = [("one server", run.go_on(), run.audit())]
        came = time.monotonic()
        node = run.join("late")
        run.wait("the second server", lambda: run.state("server-1") == "ready")
        came = time.monotonic() - came
        parts.append(("a second one, on a node that came", run.go_on(), run.audit()))
        went = time.monotonic()
        node.send_signal(signal.SIGTERM)
        code = node.wait(HANG_S)
        went = time.monotonic() - went
        run.wait("its end", lambda: run.state("server-1") == "waiting for room")
        parts.append(("the node has gone", run.go_on(), run.audit()))
        run.process.send_signal(signal.SIGINT)
        run.process.wait(HANG_S)
    finally:
        for process in (node, run.process):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
    print("| | servers ready | groups under way | sequences finished | continued elsewhere | lost | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for part in parts:
        print(row(*part))
    last = run.audit()
    print(row("the whole run, with the steps between", run.steps(), last))
    problems = last["problems"]
    print(
        f"\nfrom the node's coming to its server's first request {came:.0f} s, from its notice to its end {went:.1f} s"
    )
    print(
        f"the node's warden ended with {code}, the run with {run.process.returncode}; problems in the audit: {problems}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
