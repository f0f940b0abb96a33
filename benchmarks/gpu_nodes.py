"""Two GPUs of one host as two nodes: training on one, an SGLang server on the other, weights broadcast between them.

    python benchmarks/gpu_runs.py model FOLDER --size 0.5b
    python benchmarks/gpu_nodes.py FOLDER --program "python3 -m sglang.launch_server" [--only WORD ...] [--out FILE]

Each row is a run of its own, as in `cluster_faults.py`: after three steps one thing happens to it, and then it must
come to its last step by itself. `NCCL_HOSTID` makes the server's node another host to NCCL, so that the broadcast goes
through the network's interface, as between two hosts, and not over NVLink. The weights of the server are held against
the trainer's after every update. A row takes two minutes and more; several of these programs may run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from cluster_faults import HEADER, Row, kill, later, line_of, try_fault
from cluster_faults import _later as things_due
from clusters import STEPS, Local, Run

from areal_core.driver.attempts import ask_owner
from areal_core.messages.processes import WhoOwns
from areal_core.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

PUBLISHING_S = 120.0
"""For a publication to begin; there is one in each step."""
SERVER = "--model-path"
"""In the command of a server, and of no other process."""


def make_config(model: Path, program: list[str], options: dict[str, Any], *, on_cpu: bool) -> str:
    """The run, as a config file would have it."""
    parts = Path(__file__).with_name("gpu_parts.py")
    config = {
        "plugins": ["grpo", "fsdp", "sglang"],
        "steps": STEPS,
        "model": {"path": str(model), "dtype": "float32" if on_cpu else "bfloat16"},
        "dataset": f"{parts}:RandomPrompts",
        "workflow": "single_turn",
        "rewards": [f"{parts}:lower_half", "parts.py:slow"],
        "sampling": {"max_new_tokens": 8 if on_cpu else 128},
        "rollout": {"batch_size": 4 if on_cpu else 8, "group_size": 4, "max_staleness": 1, "stall_timeout_s": 600},
        "inference_engine": {"type": "sglang", "program": program, "update_mode": "recompute", "options": options},
        "publication": {"transport": "broadcast", "verify_every": 1},
        "launcher": {"type": "local", "nodes": 2},
        "train_engine": {"type": "fsdp", "learning_rate": 1e-5},
        "algorithm": "grpo",
        "checkpoint": {"every": 2, "export": False},
    }
    if not on_cpu:
        config["placement"] = {"training": [0], "generation": [1]}
        config["train_engine"] |= {"max_tokens_per_microbatch": 32768}
    return yaml.safe_dump(config, sort_keys=False)


def nothing(cluster: Any, run: Run) -> None:
    """No fault at all."""
    del cluster, run


def kill_while_publishing(cluster: Any, run: Run) -> None:
    """The server, as soon as the trainer says that it publishes."""
    del cluster
    deadline, pid = time.monotonic() + PUBLISHING_S, run.pid("server")
    while time.monotonic() < deadline:
        owner = ask_owner(RunFolder(run.path).attempts()[-1], WhoOwns(), 2.0)
        if "publish" in owner.phases.get("trainer-0", ""):
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.005)
    raise TimeoutError(f"the trainer did not publish in {PUBLISHING_S:g} s")


def kill_warden(cluster: Any, run: Run) -> None:
    """Of the server's node: what is on it ends with it."""
    del cluster
    os.kill(run.pid(f"warden {_node_of_server(run)}"), signal.SIGKILL)


def silence_node(cluster: Any, run: Run) -> None:
    """Everything on the server's node stops for longer than the lease; then it wakes."""
    name = _node_of_server(run)
    cluster.signal_node(name, signal.SIGSTOP)
    later(lambda: cluster.signal_node(name, signal.SIGCONT))


def _node_of_server(run: Run) -> str:
    return next(variables["AREAL_NODE"] for _, variables, command in run.processes() if SERVER in command)


FAULTS: dict[str, Callable[[Any, Run], None]] = {
    "none": nothing,
    "server killed": kill("server"),
    "server killed while weights are published": kill_while_publishing,
    "rank 0 killed": kill("trainer-0"),
    "controller killed": kill("controller"),
    "warden of the server's node killed": kill_warden,
    "the server's node stopped 80 s": silence_node,
}


def main() -> None:
    """All faults in a row; the table is written as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--program", default="python3 -m sglang.launch_server")
    parser.add_argument("--options", default="{}", help="of the server, as JSON; null leaves one out; cpu is a device")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name has one of these words in it")
    parser.add_argument("--out", type=Path, help="rows as JSON")
    arguments = parser.parse_args()
    options = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.12,
        "disable_custom_all_reduce": True,
        "cuda_graph_bs": [8, 32],
    } | json.loads(arguments.options)
    options = {name: value for name, value in options.items() if value is not None}
    on_cpu = options.get("device") == "cpu"
    program = ["env", "NCCL_HOSTID=the-servers-node", *shlex.split(arguments.program)]
    config = make_config(arguments.model.resolve(), program, options, on_cpu=on_cpu)
    base = Path(tempfile.mkdtemp(prefix="areal-nodes-"))
    rows: list[Row] = []
    print(HEADER, flush=True)
    try:
        for number, (name, fault) in enumerate(FAULTS.items()):
            if arguments.only and not any(word in name for word in arguments.only):
                continue
            cluster, folder = Local(), base / f"run-{number}"
            folder.mkdir()
            try:
                row = try_fault(cluster, Run(folder, config, {"server": SERVER}), name, fault)
            except (TimeoutError, LookupError, RuntimeError, OSError, StopIteration) as error:
                row = Row(name, happened=f"{type(error).__name__}: {error}")
            things_due.clear()
            rows.append(row)
            print(line_of(row), flush=True)
            print(f"  {measured(folder / 'run')}", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
            cluster.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def measured(run_dir: Path) -> str:
    """What the steps say of updates: how long one took, and the largest difference of log-probabilities after one."""
    path = run_dir / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = []
    for key, choose in (("publish/transfer_s", max), ("publish/stop_s", max), ("verify/logprob_difference_mean", max)):
        values = [step[key] for step in steps if key in step]
        found.append(f"{key} at most {choose(values):.4g} in {len(values)} steps" if values else f"no {key}")
    return "; ".join(found)


if __name__ == "__main__":
    main()
