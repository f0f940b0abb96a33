"""A run under load whose servers join, leave and are killed, and one of whose ranks is: what each costs, in seconds.

    python benchmarks/gpu_elastic.py --model FOLDER --program "python3 -m sglang.launch_server"      # on four GPUs
    python benchmarks/gpu_elastic.py --gpus 2 ...      # both servers share the first GPU, one rank has the other
    python benchmarks/gpu_elastic.py --cpu --program "SERVERS/sglang/bin/python tests/servers_on_cpu/sglang_cpu.py"

The run has a server on the first GPU and ranks on the last two. Once it trains, `areal serve --join` starts a second
server beside it, on the GPU between; then the run's own server is killed, then the last rank within a train step; the
run starts both again. At last the second server is interrupted, and the run goes on with its own. A JSON line for each
event, with samples a second of the steps between; then the audit of the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from gpu_faults import AREAL, OPTIONS, POLL_S, ROOT, Run, log, phase_of, place_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runtime.messages import RunStatus

PATIENCE = {"group_timeout_s": 30, "update_timeout_s": 60}
OWN, SECOND = "server-0", "second"


def make_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run, as a config file would have it."""
    on_cpu, parts = arguments.cpu, ROOT / "benchmarks" / "gpu_parts.py"
    engine: dict[str, Any] = {"type": "sglang", "options": OPTIONS | {"mem_fraction_static": 0.6}}
    if on_cpu:
        engine = yaml.safe_load((ROOT / "tests/servers_on_cpu/sglang.yaml").read_text())["inference_engine"]
    batch = {"batch_size": 2, "group_size": 2} if on_cpu else {"batch_size": 64, "group_size": 8}
    config: dict[str, Any] = {
        "plugins": ["grpo", "fsdp", "sglang"],
        "steps": 100_000,
        "model": {"path": str(arguments.model.resolve()), "dtype": "float32" if on_cpu else "bfloat16"},
        "train_engine": {"type": "fsdp", "learning_rate": 1e-6, "max_tokens_per_microbatch": 32768},
        "checkpoint": {"every": 3, "keep": 1, "export": False},
        "algorithm": "grpo",
        "dataset": f"{parts}:RandomPrompts",
        "workflow": "single_turn",
        "rewards": [f"{parts}:lower_half"],
        "sampling": {"max_new_tokens": 8 if on_cpu else arguments.tokens},
        "rollout": {**batch, "max_staleness": 1, "workers": 1 if on_cpu else 2},
        "inference_engine": engine | {"program": shlex.split(arguments.program), "servers": 1, **PATIENCE},
        "weight_sync": {"transport": "broadcast", "logprob_check_every": 0, "timeout_s": 40},
    }
    if on_cpu:
        return config | {"launcher": {"trainer_processes": 2}}
    return config | {"placement": {"generation": [0], "training": [2, 3] if arguments.gpus >= 4 else [1]}}


class Elastic:
    """The events, one after another.

    Args:
        run: that goes on.
        arguments: of the command line.
        folder: for what is written.
    """

    def __init__(self, run: Run, arguments: argparse.Namespace, folder: Path) -> None:
        self._run, self._arguments = run, arguments
        self._deadline = time.monotonic() + arguments.limit_s
        self._told = folder / "second.log"
        self._second: subprocess.Popen[bytes] | None = None
        self._driving: RunStatus | None = None
        self._mark = 0

    def go(self) -> None:
        """Everything in its order."""
        self._until(lambda: bool(self._run.steps), "the first step")
        self._mark = len(self._run.steps)
        joined = self._join()
        self._steps(3)
        log(event="joined", after_s=joined, **self._window())
        log(event="server killed", **self._kill_server())
        self._steps(1)
        log(event="without the server", **self._window())
        log(event="rank killed", **self._kill_rank())
        self._mark = len(self._run.steps)
        back = self._until(lambda: self._state(OWN) == "ready", "the run's own server")
        self._steps(2)
        log(event="both again", further_s=back, **self._window())
        log(event="left", after_s=self._leave(), states=self._states(SECOND)[-2:])
        self._steps(2)
        log(event="one server", **self._window())

    def close(self) -> None:
        """End the second server."""
        if self._second is not None and self._second.poll() is None:
            self._second.kill()
            self._second.wait()

    def _join(self) -> float:
        words = [*AREAL, "serve", "--join", str(self._run.path), "--name", SECOND]
        words += [] if self._arguments.cpu else ["--gpus", "1" if self._arguments.gpus >= 4 else "0"]
        with self._told.open("wb") as output:
            self._second = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, "NCCL_CUMEM_ENABLE": "0"}, stdout=output, stderr=output
            )
        return self._until(lambda: self._state(SECOND) == "ready", "the second server")

    def _leave(self) -> float:
        assert self._second is not None
        self._second.send_signal(signal.SIGINT)
        return self._until(lambda: self._second is None or self._second.poll() is not None, "its leaving")

    def _kill_server(self) -> dict[str, Any]:
        """SIGKILL for the run's own server."""
        assert self._driving is not None
        before = len(self._states(OWN))
        os.kill(self._driving.processes[OWN].pid, signal.SIGKILL)
        seen = self._until(lambda: len(self._states(OWN)) > before, "the loss is seen")
        return {"seen_s": seen, "step_s": round(seen + self._steps(1), 2), "states": self._states(OWN)[before:]}

    def _kill_rank(self) -> dict[str, Any]:
        """SIGKILL for the last rank within a train step; the checkpoint of before must be there."""
        self._until(lambda: any(self._run.path.glob("attempts/*/checkpoints/step-*/*")), "a checkpoint")
        self._until(lambda: phase_of(self._driving) != "train", "the end of a train step")
        self._until(lambda: phase_of(self._driving) == "train", "the next train step")
        time.sleep(self._run.steps[-1][1].get("time/train_s", 0.0) / 3)
        driving, lines, step = self._driving, len(self._run.lines), self._run.steps[-1][1]["step"]
        assert driving is not None
        attempt = driving.attempt
        ranks = [process for process in driving.processes.values() if process.role == "trainer"]
        os.kill(ranks[-1].pid, signal.SIGKILL)
        began, done = time.monotonic(), len(self._run.steps)
        self._until(lambda: self._driving is not None and self._driving.attempt > attempt, "the next attempt")
        next_s = time.monotonic() - began
        self._until(lambda: len(self._run.steps) > done, "its first step")
        found = {"next_attempt_s": round(next_s, 2), "step_s": round(time.monotonic() - began, 2)}
        back = step - self._run.steps[done][1]["step"] + 1
        return found | {"steps_back": back, "told": [line for _, line in self._run.lines[lines:]][:6]}

    def _steps(self, more: int) -> float:
        goal = len(self._run.steps) + more
        return self._until(lambda: len(self._run.steps) >= goal, f"{more} further steps")

    def _until(self, condition: Callable[[], bool], what: str) -> float:
        """Look until something is so; the seconds."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > self._deadline:
                raise SystemExit(f"no time is left for: {what}; {self._run.output.read_text()[-2000:]}")
            if self._run.process.poll() is not None:
                raise SystemExit(f"the run ended before: {what}; {self._run.output.read_text()[-2000:]}")
            if self._second is not None and self._second.poll() not in (None, 0):
                raise SystemExit(f"the second server ended before: {what}; {self._told.read_text()[-2000:]}")
            time.sleep(5 * POLL_S)
            self._driving = self._run.look() or self._driving
        return round(time.monotonic() - began, 2)

    def _window(self) -> dict[str, Any]:
        """Of the steps since the last window: samples a second, and the metrics that tell of servers."""
        steps, self._mark = self._run.steps[self._mark - 1 :], len(self._run.steps)
        lines = [line for _, line in steps[1:]]
        seconds = steps[-1][0] - steps[0][0] if lines else 0.0
        samples = sum(line["batch/sequences"] for line in lines)
        kept = ("servers/failed", "servers/continued", "groups/failed")
        sums = {key: sum(line.get(key, 0) for line in lines) for key in kept}
        times = ("time/weight_sync_s", "weight_sync/transfer_s", "time/checkpoint_s", "time/step_s")
        found = {key: [round(line.get(key, 0.0), 3) for line in lines][-6:] for key in times}
        ready = [int(line.get("servers/ready", 0)) for line in lines][-6:]
        rate = round(samples / seconds, 2) if seconds else 0.0
        return {"steps": len(lines), "samples_per_s": rate, "servers_ready": ready, **sums, **found}

    def _states(self, name: str) -> list[str]:
        path = self._run.path / "logs" / "servers.jsonl"
        text = path.read_text() if path.is_file() else ""
        entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [entry["state"] for entry in entries if entry["server"] == name]

    def _state(self, name: str) -> str:
        return (self._states(name) or [""])[-1]


def main() -> int:
    """Start, disturb, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; by default one with random weights is made")
    parser.add_argument("--size", default="0.5b")
    parser.add_argument("--program", default="python3 -m sglang.launch_server")
    parser.add_argument("--gpus", type=int, default=4, choices=(2, 4))
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--folder", type=Path, help="for the run and its output")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    folder = place_for(arguments, "gpu-elastic", arguments.size)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(make_config(arguments), sort_keys=False))
    run = Run(config)
    elastic, failed = Elastic(run, arguments, folder), False
    try:
        elastic.go()
        run.process.send_signal(signal.SIGINT)
        run.process.wait(40)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        failed = True
        log(error=str(error)[-3000:])
    finally:
        elastic.close()
        run.process.kill()
    audit = subprocess.run([*AREAL, "audit", str(run.path), "--json"], capture_output=True, text=True, check=False)
    log(exit_code=run.process.wait(), steps=len(run.steps), audit=audit.returncode, of=audit.stdout or audit.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
