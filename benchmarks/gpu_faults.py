"""SGLang and the FSDP engine on a GPU each: the trainer is killed inside a broadcast, and user code touches CUDA.

    python benchmarks/gpu_faults.py killed|touched|touched-by-ranks --model FOLDER --program "python3 -m ..."
    python benchmarks/gpu_faults.py killed --cpu

`killed` sends SIGKILL to trainer-0 in each phase of `--inside` in turn, after two further steps, and tells seconds from
there; servers stay where no weights are under way. In `touched` the module of a reward, and with ranks that of the data
set, uses CUDA as it is imported: every process that imports it notes what it saw. A JSON line for each fact. `--cpu`
proves the program on a tiny model, with the server of `tests/servers_on_cpu/make_environment.py sglang`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from gpu_runs import make_model

from areal_core.runs import RunFolder
from areal_core.runtime.attempts import ask_driver
from areal_core.runtime.messages import RunStatus, StatusRequest

ROOT = Path(__file__).parents[1]
AREAL = [sys.executable, "-m", "areal_core"]
OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
           "mem_fraction_static": 0.3, "disable_custom_all_reduce": True, "cuda_graph_bs_decode": [8, 32]}  # fmt: skip
ASK_TIMEOUT_S, POLL_S = 2.0, 0.004
SHOWN = ("step", "time/step_s", "time/weight_sync_s", "weight_sync/transfer_s", "logprob_check/difference_mean")


def log(**fact: Any) -> None:
    """A line of what was found."""
    print(json.dumps(fact), flush=True)


def make_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The run, as a config file would have it."""
    on_cpu, parts = arguments.cpu, ROOT / "benchmarks" / "gpu_touching.py"
    config: dict[str, Any] = {
        "plugins": ["grpo", "finetuning", "fsdp", "sglang"],
        "steps": 1000 if arguments.what == "killed" else 3,
        "model": {"path": str(arguments.model.resolve()), "dtype": "float32" if on_cpu else "bfloat16"},
        "train_engine": {"type": "fsdp", "learning_rate": 1e-5},
        "checkpoint": {"every": 2, "export": False},
    }
    if arguments.what == "touched-by-ranks":
        config |= {"algorithm": "sft", "dataset": f"{parts}:Sentences", "rollout": {"batch_size": 4}}
        return config | ({"launcher": {"trainer_processes": 2}} if on_cpu else {"placement": {"training": [0, 1]}})
    engine = {"type": "sglang", "program": shlex.split(arguments.program), "options": OPTIONS}
    if on_cpu:
        engine = yaml.safe_load((ROOT / "tests/servers_on_cpu/sglang.yaml").read_text())["inference_engine"]
    else:
        config |= {"placement": {"generation": [0], "training": [1]}}
    return config | {
        "algorithm": "grpo",
        "dataset": f"{parts.with_name('gpu_parts.py')}:RandomPrompts",
        "workflow": "single_turn",
        "rewards": [f"{parts if arguments.what == 'touched' else parts.with_name('gpu_parts.py')}:lower_half"],
        "sampling": {"max_new_tokens": 8 if on_cpu else 256},
        "rollout": {"batch_size": 2 if on_cpu else 16, "group_size": 4, "max_staleness": 1, "workers": 1},
        "inference_engine": engine | {"update_mode": "recompute"},
        "weight_sync": {"transport": "broadcast", "logprob_check_every": 2},
    }


class Run:
    """A run as a user starts it, in the folder of its config, and what it said and did when."""

    def __init__(self, config: Path) -> None:
        self.path, self.output = config.parent / "run", config.parent / "output.log"
        self.steps: list[tuple[float, dict[str, Any]]] = []
        self.lines: list[tuple[float, str]] = []
        self._read = {self.path / "metrics.jsonl": 0, self.output: 0}
        notes = {"NCCL_CUMEM_ENABLE": "0", "GPU_FAULTS_NOTES": str(config.with_name("touched.jsonl"))}
        command = [*AREAL, "run", str(config), f"run_dir={self.path}"]
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **notes}, stdout=log, stderr=log)

    def look(self) -> RunStatus | None:
        """Read what is new, and ask how the run is; ends the program where the run has failed."""
        now, (metrics, output) = time.monotonic(), self._read
        self.steps += [(now, json.loads(line)) for line in self._new(metrics)]
        self.lines += [(now, line) for line in self._new(output)]
        if self.process.poll():
            raise SystemExit(f"the run ended with {self.process.returncode}:\n{self.output.read_text()[-4000:]}")
        attempt = RunFolder(self.path).last_attempt
        answer = ask_driver(attempt, StatusRequest(), ASK_TIMEOUT_S) if attempt is not None else None
        return answer if isinstance(answer, RunStatus) else None

    def open_updates(self) -> int:
        """Broadcasts that the server's log tells the beginning of, and not the end."""
        log = self.path / "logs" / "server-0.log"
        data = log.read_bytes() if log.is_file() else b""
        return data.count(b"POST /begin_weight_update") - data.count(b"POST /end_weight_update")

    def _new(self, path: Path) -> list[str]:
        data = path.read_bytes() if path.is_file() else b""
        start = min(self._read[path], len(data))  # a resume takes back the steps behind its checkpoint
        self._read[path] = max(start, data.rfind(b"\n") + 1)
        return data[start : self._read[path]].decode(errors="replace").splitlines()


def phase_of(driving: RunStatus | None) -> str:
    """What rank 0 is doing."""
    return driving.processes["trainer-0"].phase if driving and "trainer-0" in driving.processes else ""


def server_of(driving: RunStatus | None) -> int:
    """Process id of the server; 0 where there is none."""
    return next((one.pid for one in driving.processes.values() if one.role == "server"), 0) if driving else 0


def kill_inside(run: Run, phase: str, deadline: float) -> None:
    """SIGKILL for rank 0 in the middle of a phase, and what comes of it until two further steps are done."""
    goal, former, now, driving, base = len(run.steps) + 3, "", "", None, 0
    while driving is None or len(run.steps) < goal or not now == phase != former != "":
        if time.monotonic() > deadline:
            raise SystemExit(f"no '{phase}' behind {len(run.steps)} steps: {run.output.read_text()[-3000:]}")
        base = base if now == "weight_sync" else run.open_updates()
        time.sleep(POLL_S)
        driving = run.look()
        former, now = now, phase_of(driving)
    if phase == "weight_sync":
        while run.open_updates() <= base and time.monotonic() < deadline:
            time.sleep(POLL_S / 8)
    else:
        time.sleep(run.steps[-1][1].get(f"time/{phase}_s", 0.0) / 2)
    server, attempt, said = server_of(driving), driving.attempt, len(run.lines)
    os.kill(driving.processes["trainer-0"].pid, signal.SIGKILL)
    began, found, was = time.monotonic(), dict[str, Any](), ""
    then = {"phase_then": phase_of(run.look()), "open_updates": run.open_updates() - base}
    done = len(run.steps)
    log(killed_in=phase, **then, step=run.steps[-1][1]["step"], server=server)
    while time.monotonic() < deadline and len(run.steps) < done + 2:
        time.sleep(POLL_S)
        driving, since = run.look(), round(time.monotonic() - began, 2)
        now = phase_of(driving)
        has_begun = driving is not None and driving.attempt > attempt
        seen = {
            "told_s": any("killed" in line for _, line in run.lines[said:]),
            "next_attempt_s": has_begun,
            "server_updating_s": has_begun and now == "weight_sync",
            "server_updated_s": has_begun and was == "weight_sync" != now,
            "other_server_s": server_of(driving) not in (0, server),
            "step_s": has_begun and len(run.steps) > done,
        }
        found = {key: since for key, is_so in seen.items() if is_so} | found
        was = now if has_begun else ""
    found |= {"server_kept": server_of(driving) == server, "open_updates_left": run.open_updates() - base}
    log(killed_in=phase, **found, told=[line for _, line in run.lines[said:]][:12])


def place_for(arguments: argparse.Namespace, name: str, size: str) -> Path:
    """The folder of a run and its output, with a model in it where none is named."""
    folder: Path = (arguments.folder or Path(tempfile.mkdtemp(prefix=f"areal-{name}-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.model is None:
        arguments.model = folder / "model"
        make_model(arguments.model, "tiny" if arguments.cpu else size)
    return folder


def main() -> int:
    """Start, disturb, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("killed", "touched", "touched-by-ranks"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--program", default="python3 -m sglang.launch_server")
    parser.add_argument("--inside", nargs="*", default=["weight_sync", "train"], help="phases in which to kill")
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--folder", type=Path, help="for the run and its output")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_intermixed_args()
    folder = place_for(arguments, "gpu-faults", "0.5b")
    config, notes = folder / "config.yaml", folder / "touched.jsonl"
    config.write_text(yaml.safe_dump(make_config(arguments), sort_keys=False))
    began, run, is_killed = time.monotonic(), Run(config), arguments.what == "killed"
    try:
        for phase in arguments.inside if is_killed else []:
            kill_inside(run, phase, began + arguments.limit_s)
        while not is_killed and run.process.poll() is None and time.monotonic() < began + arguments.limit_s:
            time.sleep(0.1)
            run.look()
        run.process.send_signal(signal.SIGINT)
        run.process.wait(30)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        log(error=str(error)[-2000:])
    finally:
        run.process.kill()
    print(notes.read_text() if notes.is_file() else "", end="")
    for when, step in run.steps:
        log(at_s=round(when - began, 1), **{key: round(step[key], 4) for key in SHOWN if key in step})
    audit = subprocess.run([*AREAL, "audit", str(run.path), "--json"], capture_output=True, text=True, check=False)
    log(what=arguments.what, exit_code=run.process.wait(), audit=audit.returncode, of=audit.stdout or audit.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
