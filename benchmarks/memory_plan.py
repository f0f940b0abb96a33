"""The memory that the dry run plans for one GPU, and what trainer and server then take, for several sizes of model.

    python benchmarks/memory_plan.py FOLDER --engine sglang|vllm --python SITE/python --tokenizer MODEL --gpu 0
    python benchmarks/memory_plan.py FOLDER --engine sglang --tokenizer MODEL --sizes tiny --plan-alone    # on a CPU

The run is that of one_gpu_ENGINE.yaml without its limits of memory, so areal plans the server's part of the GPU.
Models have random weights. `planned` is the dry run's. Of the trainer, `measured` is the peak of PyTorch's allocator in
five steps; `process` is what the driver counts for a process, which includes the context of CUDA and the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import yaml
from asynchronous import read_metrics
from gpu_train_step_sizes import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
LIMITS = {
    "sglang": ("mem_fraction_static", "max_total_tokens"),
    "vllm": ("gpu_memory_utilization", "kv_cache_memory_bytes"),
}
GIB = 2**30


def make_model(size: str, folder: Path, tokenizer: str) -> Path:
    """Write a model with random weights and a tokenizer, unless it is there."""
    if not (folder / "config.json").exists():
        config = make_config("1.5b" if size == "tiny" else size, tiny=size == "tiny")
        kept = AutoTokenizer.from_pretrained(tokenizer)
        config.vocab_size = max(config.vocab_size, len(kept))
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        kept.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return folder


def make_run(engine: str, folder: Path, model: Path) -> Path:
    """Write the config: the benchmark's, without what limits the server's memory."""
    config = yaml.safe_load((HERE / f"one_gpu_{engine}.yaml").read_text())
    for limit in LIMITS[engine]:
        config["inference_engine"]["options"].pop(limit)
    for section in (config, config["evaluation"]):
        section["dataset"]["type"] = str(HERE.parent / "examples" / "few_shot.py:FewShot")
    config |= {"model": {"path": str(model), "dtype": "bfloat16"}, "evaluation": None, "steps": 5}
    config["weight_sync"] = {"transport": "memory"}
    config["checkpoint"] = {"every_s": 0, "export": False}
    path = folder / f"{engine}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Watch:
    """The largest memory of each process on a GPU, by the driver's count, sampled every 0.2 s while it is entered."""

    def __init__(self, gpu: str) -> None:
        self.peaks: dict[int, int] = defaultdict(int)
        self.names: dict[int, str] = {}
        self._query = ["nvidia-smi", "-i", gpu, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            lines = subprocess.run(self._query, capture_output=True, text=True, check=False).stdout.splitlines()
            for pid, mebibytes in (line.split(",") for line in lines if line.count(",") == 1):
                self.peaks[int(pid)] = max(self.peaks[int(pid)], int(mebibytes) << 20)
                self._name(int(pid))

    def _name(self, pid: int) -> None:
        path = Path(f"/proc/{pid}/cmdline")
        if pid not in self.names and path.exists():
            self.names[pid] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:60]


def measure(arguments: argparse.Namespace, size: str) -> dict[str, Any]:
    """Plan and run one size of model."""
    folder = (arguments.folder / f"{arguments.engine}-{size}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(size, arguments.folder.resolve() / f"model-{size}", arguments.tokenizer)
    command = [arguments.python, "-m", "areal_core", "run", str(make_run(arguments.engine, folder, model))]
    if arguments.plan_alone:
        command += ["placement.gpu_memory_gib=139", "inference_engine.program=[python,-c,pass]"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": arguments.gpu}
    planned = subprocess.run(
        [*command, "--dry-run", "--json"], env=variables, capture_output=True, text=True, check=False
    )
    if planned.returncode:
        return {"size": size, "error": planned.stderr[-400:]}
    plan = json.loads(planned.stdout)
    found = {"size": size, "rows": list(rows_about_memory(plan)), "planned": plan["memory"], "share": plan["gpu_share"]}
    if arguments.plan_alone:
        return found
    run_dir = folder / "run"
    with Watch(arguments.gpu) as watch, (folder / "log").open("wb") as log:
        command.append(f"run_dir={run_dir}")
        run = subprocess.run(command, env=variables, stdout=log, stderr=log, check=False, timeout=280)
    found["exit"] = run.returncode
    lines = read_metrics(run_dir / "metrics.jsonl")
    found["measured"] = max((line.get("engine/peak_memory_gib", 0.0) for line in lines), default=0.0)
    found["process"] = {watch.names.get(pid, "?"): round(peak / GIB, 1) for pid, peak in watch.peaks.items()}
    return found


def rows_about_memory(plan: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of the plan that say what fits."""
    for label, text in plan["rows"]:
        if "GiB" in text or "GiB" in label:
            yield [label, text]


def main() -> None:
    """Print one line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=LIMITS, required=True)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--tokenizer", required=True, help="folder of a model whose tokenizer the models get")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "30b-a3b-slice"])
    parser.add_argument("--plan-alone", action="store_true", help="for a machine without a GPU")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        try:
            print(json.dumps(measure(arguments, size)), flush=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(json.dumps({"size": size, "error": str(error)[-400:]}), flush=True)


if __name__ == "__main__":
    main()
