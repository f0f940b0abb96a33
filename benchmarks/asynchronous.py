"""Asynchronous against synchronous training on GPUs of one host: SGLang generates, answers have a long tail. One table.

    python benchmarks/asynchronous.py --size 1.5b --program "python3 -m sglang.launch_server" --output table.json
    python benchmarks/asynchronous.py ... --rows turns-sync,turns-async-2     # adds rows to the same file
    python benchmarks/asynchronous.py ... --servers 2 --trainers 2 --batch 128     # on four GPUs

Every answer has a length that was drawn beforehand, from a lognormal whose 99th percentile is ten times its median, so
all rows generate and train on the same. The rows: (a) `turns-sync`, all GPUs generate, then all train; (b) `sync`,
`--servers` GPUs generate, one server on each, and `--trainers` others train, `max_staleness` 0; `async-1`, `-2`, `-4`,
the same GPUs with a bound on staleness of so many batches and one batch more than that in the pipeline;
`async-2-keep-cache` and `-4-`, where live requests keep their keys and values over an update instead of having them
rebuilt; `async-1-drained`, `-2-` and `-4-`, where no request is interrupted: an update waits until those under way have
ended, and new ones wait for the update; `async-2-workers`, where workflows run in four processes instead of one;
`async-2-drop`, where a group with a token over the bound is dropped (elsewhere such tokens are masked, so that no row
trains on shorter answers than another); `turns-async-2`; and `verified`, a few steps at a bound of 1 whose learning
rate changes the policy from step to step, with every server's log-probabilities compared with the trainer's after
every update: its seconds are no measurement. Draining is this
benchmark's own: in areal requests always go on over an update.

What asynchronous training can gain at most, from what was measured without it:

- In turns, the same GPUs do both, so it can only spare the time in which they wait for the last answers:
  (T_generate,sync + T_train) / (tokens / peak rate + T_train), over (a). Both times are (a)'s, and the peak rate is
  that of all GPUs. Releasing memory and syncing weights are in the measured ratio and not in the bound.
- On GPUs of their own the slower side decides: T_sync / max(tokens / peak rate, T_train), with the step of (a) or (b)
  as T_sync, T_train of (b), and the peak rate of the GPUs that generate.

The peak rate is measured in the same command (`peak`): one server, saturated with `--concurrent` requests of these
lengths by a client that does nothing else, and no training; several have so many times as much. A ratio is one of
samples per second over all steps behind the warm-up; its share of the bound is the last column. Times are means, for a
median hides the tail; one column is a median. A second table has what updates and processes cost: seconds of the parts
of a weight sync, requests that went on over it, and the cores that controller, rollout workers and ranks had in use.

What was generated while the first steps compiled would count as generated in the steps that are measured, so the
warm-up goes on until the trainer has waited for a batch: then none is stored. Where training is the slower side that
does not come, and stored batches make no step shorter; the warm-up then ends after as many steps as are measured, and
the second table says so. It has the longest train step too: one that compiled anew stands out.

The rows on GPUs of their own share servers, which `areal serve` starts; those in turns start as many as there are GPUs.
`--output` is written anew after every row. A run is killed when it has done its steps; one that `--limit-s` or
`--total-s` ends before counts with the steps that it has done, if these are two at least. On two H200s a server starts
in 90 to 120 s, and a row takes 75 to 150 s, in turns 250 s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from asynchronous_load import cpu_seconds
from asynchronous_parts import CUT
from asynchronous_peak import measure_peak, wait_until_healthy
from asynchronous_table import end_of_warm_up, summarize, table, table_of_load
from gpu_runs import SIZES
from run_ends import GONE_S, RUN_VARIABLE, end_run, leave_when_asked

from areal_core.runtime.network import free_port

AREAL = [sys.executable, "-m", "areal_core"]
SERVER_OPTIONS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "disable_custom_all_reduce": True,
    "max_running_requests": 512,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512],
}
SERVERS_ON_CPU = Path(__file__).parents[1] / "tests" / "servers_on_cpu" / "sglang.yaml"
ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Row:
    """One way to train."""

    title: str
    max_staleness: int
    colocated: bool = False
    mode: str = "recompute"
    stale: str = "mask"
    engine: str = "sglang"
    verified: bool = False
    workers: int = 1

    @property
    def is_synchronous(self) -> bool:
        """Whether a batch is generated only when the one before has been trained on."""
        return not self.max_staleness


ROWS = {
    "turns-sync": Row("(a) synchronous, in turns", 0, colocated=True),
    "sync": Row("(b) synchronous, apart", 0),
    "async-1": Row("asynchronous, at most 1", 1),
    "async-2": Row("asynchronous, at most 2", 2),
    "async-4": Row("asynchronous, at most 4", 4),
    "async-2-keep-cache": Row("at most 2, `keep_cache`", 2, mode="keep_cache"),
    "async-4-keep-cache": Row("at most 4, `keep_cache`", 4, mode="keep_cache"),
    "async-1-drained": Row("at most 1, drained before an update", 1, engine="DrainingAdapter"),
    "async-2-drained": Row("at most 2, drained before an update", 2, engine="DrainingAdapter"),
    "async-4-drained": Row("at most 4, drained before an update", 4, engine="DrainingAdapter"),
    "async-2-drop": Row("at most 2, stale groups dropped", 2, stale="drop"),
    "turns-async-2": Row("asynchronous in turns, at most 2", 2, colocated=True),
    "async-2-workers": Row("at most 2, four workflow workers", 2, workers=4),
    "verified": Row("at most 1, verified after every update", 1, verified=True),
}
ORDER = ",".join(["peak", *sorted(ROWS, key=lambda name: ROWS[name].colocated)])


def prepare_model(arguments: argparse.Namespace, folder: Path) -> int:
    """A model without an end token, so that no answer ends before its time; the size of its vocabulary."""
    from transformers import AutoTokenizer

    if arguments.model is None:  # in a process of its own, which leaves no memory taken on the first GPU
        words = [str(Path(__file__).with_name("gpu_runs.py")), "model", str(folder), "--size", arguments.size]
        subprocess.run([sys.executable, *words], check=True)
    else:
        shutil.copytree(arguments.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # it names end tokens as well
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def make_config(
    arguments: argparse.Namespace, row: Row, model: Path, vocabulary: int, addresses: list[str]
) -> dict[str, Any]:
    """The run of a row, as a config file would have it; without addresses the run starts servers of its own."""
    gpus = list(range(arguments.servers + arguments.trainers))
    generation, training = (gpus, gpus) if row.colocated else (gpus[: arguments.servers], gpus[arguments.servers :])
    parts = Path(__file__).with_name("asynchronous_parts.py")
    bounds = {"minimum": len(generation), "maximum": 0 if addresses else len(generation)}
    lengths = {"median": arguments.median, "answers": arguments.group, "prompt": arguments.prompt}
    config = {
        "plugins": ["grpo", "fsdp", "sglang"],
        "steps": 10_000,  # it is ended before it would write a checkpoint
        "shuffle": False,
        "model": {"path": str(model), "dtype": arguments.dtype},
        "dataset": {"type": f"{parts}:LongTail", "vocabulary": vocabulary, **lengths},
        "workflow": f"{parts}:ForcedLength",
        "sampling": {"max_new_tokens": CUT * arguments.median},
        "rollout": {
            "batch_size": arguments.batch,
            "group_size": arguments.group,
            "max_staleness": row.max_staleness,
            "max_pending_batches": row.max_staleness + 1,
            "stale": row.stale,
            "workers": row.workers,
        },
        "inference_engine": {
            "type": "sglang" if row.engine == "sglang" else f"{parts}:{row.engine}",
            "program": shlex.split(arguments.program),
            "memory_saver": row.colocated,
            "update_mode": row.mode,
            "options": SERVER_OPTIONS | json.loads(arguments.options),
            "servers": len(generation) if row.colocated else bounds,
            "addresses": addresses,
        },
        "weight_sync": {
            "transport": "ipc" if row.colocated else "broadcast",
            "logprob_check_every": int(row.verified),
        },
        "placement": {"generation": generation, "training": training},
        "launcher": {"type": "core/local", "trainer_processes": len(training)},
        "train_engine": {
            "type": "fsdp",
            "learning_rate": 1e-5 if row.verified else 1e-6,
            "max_tokens_per_microbatch": arguments.microbatch,
        },
        "algorithm": "grpo",
        "checkpoint": {"export": False},
    }
    return on_cpu(config) if arguments.cpu else config


def on_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """The same without GPUs: to try the program."""
    found: dict[str, Any] = yaml.safe_load(SERVERS_ON_CPU.read_text())["inference_engine"]
    engine = {**config["inference_engine"], "options": found["options"], "environment": found["environment"]}
    del config["placement"]
    return config | {"inference_engine": engine}


class Bench:
    """What the rows share: folders, the model, servers, and the results so far.

    Args:
        arguments: of the command line.
        folder: for the model, configs, run folders and logs.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._model = folder / "model"
        self._vocabulary = prepare_model(arguments, self._model)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._ends = time.monotonic() + arguments.total_s
        output: Path = arguments.output
        self.results: dict[str, Any] = json.loads(output.read_text()) if output.is_file() else {"rows": {}}

    def measure(self, name: str) -> None:
        """One row of the table, or `peak`."""
        began = time.monotonic()
        if name == "peak":
            self._start_servers()
            self.results["peak"] = measure_peak(next(iter(self._servers)), self._arguments, self._vocabulary)
        else:
            row = ROWS[name]
            if row.colocated:
                self.stop_servers()
            else:
                self._start_servers()
            lines, warm_up, cores = self._run(name, row)
            self.results["rows"][name] = {
                **summarize(lines, warm_up, self._arguments.prompt),
                "cores": cores,
                "lines": lines,
                "warm_up": warm_up,
            }
        self.results["setting"] = {key: str(value) for key, value in vars(self._arguments).items()}
        self.results["machine"] = machine()
        self.save()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)

    def save(self) -> None:
        """Write the results, whole or not at all."""
        output: Path = self._arguments.output
        fresh = output.with_name(f".{output.name}.new")
        fresh.write_text(json.dumps(self.results))
        fresh.replace(output)

    def stop_servers(self) -> None:
        """End the shared servers; safe to call twice."""
        servers, self._servers = self._servers, {}
        for server in servers.values():
            server.send_signal(signal.SIGTERM)
        for server in servers.values():
            server.wait(GONE_S)

    def _start_servers(self) -> None:
        """Have the shared servers run."""
        if not self._servers or any(server.poll() is not None for server in self._servers.values()):
            self.stop_servers()
            config = self._write("serve", make_config(self._arguments, ROWS["sync"], self._model, self._vocabulary, []))
            for gpu in range(self._arguments.servers):
                port = free_port()
                words = ["serve", str(config), "--port", str(port)]
                words += [] if self._arguments.cpu else ["--gpus", str(gpu)]
                self._servers[f"http://127.0.0.1:{port}"] = self._start(f"serve-{gpu}", words)
        for address, server in self._servers.items():
            wait_until_healthy(address, server, self._arguments.limit_s)

    def _run(self, name: str, row: Row) -> tuple[list[dict[str, float]], int, dict[str, float]]:
        """A run of a row: its journal, the steps of its warm-up, and the cores in use behind these, by role."""
        addresses = [] if row.colocated else list(self._servers)
        config = self._write(name, make_config(self._arguments, row, self._model, self._vocabulary, addresses))
        run_dir = self._folder / "runs" / name
        run = self._start(name, ["run", str(config), f"run_dir={run_dir}"], **{RUN_VARIABLE: str(run_dir)})
        steps = 4 if row.verified else self._arguments.steps * (1 if row.is_synchronous else 2)
        least, deadline = self._arguments.warm_up, min(self._ends, time.monotonic() + self._arguments.limit_s)
        lines: list[dict[str, float]] = []
        warm_up: int | None = None
        before: tuple[float, dict[str, float]] | None = None
        cores: dict[str, float] = {}
        try:
            while warm_up is None or len(lines) < warm_up + steps:
                if run.poll() is not None or time.monotonic() >= deadline:
                    break
                time.sleep(0.2)
                lines = read_metrics(run_dir / "metrics.jsonl")
                warm_up = end_of_warm_up(lines, least, least + steps)
                if before is None and warm_up is not None:
                    before = time.monotonic(), cpu_seconds(run_dir)
            if before is not None:
                after, seconds = cpu_seconds(run_dir), time.monotonic() - before[0]
                cores = {role: (after[role] - before[1].get(role, 0.0)) / seconds for role in after}
        finally:
            end_run(run, run_dir)
        if warm_up is None or len(lines) < warm_up + 2:
            words = (self._folder / f"{name}.log").read_text()[-3000:]
            raise RuntimeError(f"{name} made {len(lines)} steps, {steps} behind the warm-up were wanted:\n{words}")
        return lines[: warm_up + steps], warm_up, cores

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path

    def _start(self, name: str, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*AREAL, *words],
                env={**os.environ, **ENVIRONMENT, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The complete lines of a journal, none where it is not there yet."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def machine() -> dict[str, str]:
    """What it was measured on; asked without touching a GPU."""
    gpus = f"CPU, {os.cpu_count()} cores"
    with suppress(OSError, subprocess.CalledProcessError):
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {"gpus": gpus, **versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}


def main() -> int:
    """Measure the rows that are asked for, one after another; a row that fails is told and left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="words that start SGLang")
    parser.add_argument("--options", default="{}", help="of SGLang, as JSON, over those of this file")
    parser.add_argument("--model", type=Path, help="a folder; by default one with random weights is made")
    parser.add_argument("--size", default="1.5b", choices=SIZES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--rows", default=ORDER, help="in this order; what they need of each other is in the output file"
    )
    parser.add_argument("--output", type=Path, default=Path("asynchronous.json"))
    parser.add_argument("--folder", type=Path, help="for runs and logs; by default a temporary one")
    parser.add_argument("--servers", type=int, default=1, help="GPUs that generate, where others train")
    parser.add_argument("--trainers", type=int, default=1, help="GPUs that train, where others generate")
    parser.add_argument("--batch", type=int, default=64, help="prompts in a batch; 32 for each GPU")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--median", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=10, help="measured; twice as many where asynchronous")
    parser.add_argument("--warm-up", type=int, default=5, help="steps, at least")
    parser.add_argument("--concurrent", type=int, default=512, help="requests of the peak rate")
    parser.add_argument("--peak-s", type=float, default=12.0, help="over which the peak rate is measured")
    parser.add_argument("--microbatch", type=int, default=32768, help="tokens")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for a row, and for the server's start")
    parser.add_argument("--total-s", type=float, default=3600.0, help="for all rows")
    parser.add_argument("--cpu", action="store_true", help="try it without GPUs, by SGLang of tests/servers_on_cpu")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="areal-asynchronous-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench, failed = Bench(arguments, folder.resolve()), []
    leave_when_asked()
    try:
        for name in arguments.rows.split(","):
            try:
                bench.measure(name)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(name)
                print(f"{name} failed: {error}", flush=True)
            titles = {name: row.title for name, row in ROWS.items()}
            print(table(bench.results, titles), table_of_load(bench.results, titles), sep="\n\n", flush=True)
    finally:
        bench.stop_servers()
    print(json.dumps(bench.results.get("machine", {})), f"failed: {', '.join(failed) or 'none'}; logs in {folder}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
