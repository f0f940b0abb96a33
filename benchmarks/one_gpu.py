"""Which framework learns fastest on one GPU: areal with SGLang, areal with vLLM and colocated TRL, some seeds of each.

    python benchmarks/one_gpu.py FOLDER --model MODEL --gpus 0 1 --seeds 3 --steps 60 --sglang SGLANG_SITE/python
      --vllm VLLM_SITE/python --trl TRL_SITE/python
    python benchmarks/one_gpu.py FOLDER                 # the table and FOLDER/chart.svg of the runs that are there
    python benchmarks/one_gpu.py SWEEP --model MODEL --sglang PYTHON --trl PYTHON --rows sync trl-colocated
      --change train_engine.learning_rate=4e-5          # a sweep: a folder for each value

The task is that of one_gpu_sglang.yaml. Every run has a GPU to itself. The interpreters have areal with its plugins
beside the framework, such as those that gpu_host_kit.sh makes; a framework without one is left out. areal's servers run
for all of its runs on a GPU (`areal serve`), and a run of a few steps comes first, so that no run pays for compiling.

TRL generates and trains by turns (its default), in larger micro-batches than its default. The clock begins when models
are loaded and servers ready. It includes areal's evaluations, which generate beside the training, and leaves out those
of TRL, which stands still meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from curve import points_of
from curve_chart import draw
from curve_table import scores
from run_ends import leave_when_asked
from seeds import describe, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
SERVERS = {"sglang": 3, "vllm": 2}
"""Servers on the GPU: as many as paid off for a model of this size (docs/benchmarks.md)."""
READY_S = 420.0
COMMON = ("evaluation.samples_per_prompt=1", "evaluation.every=10", "weight_sync.transport=memory")


class Kind(NamedTuple):
    """Runs that differ in the seed alone.

    Attributes:
        title: of the table's row and the chart's curve.
        framework: `sglang`, `vllm` or `trl`.
        row: of `curve.py`, without the seed.
    """

    title: str
    framework: str
    row: str

    def folder(self, folder: Path, seed: int) -> Path:
        """Return where a run keeps what it writes."""
        return folder / f"{self.framework}-{self.row}-{seed}"


KINDS = (
    Kind("areal, SGLang, at most 1", "sglang", "async-1"),
    Kind("areal, SGLang, synchronous", "sglang", "sync"),
    Kind("areal, vLLM, at most 1", "vllm", "async-1"),
    Kind("areal, vLLM, synchronous", "vllm", "sync"),
    Kind("TRL, colocated", "trl", "trl-colocated"),
)


class Bench:
    """Makes the runs.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._folder: Path = arguments.folder.resolve()
        self._deadline = time.monotonic() + arguments.limit_s
        self._trl: queue.SimpleQueue[tuple[Kind, int]] = queue.SimpleQueue()

    def make(self) -> None:
        """Make every run that is not there. Each of areal's engines has a GPU, and TRL's runs take what is free."""
        self._folder.mkdir(parents=True, exist_ok=True)
        engines = [engine for engine in SERVERS if self._python(engine)]
        if self._python("trl"):
            for kind, seed in self._runs("trl"):
                self._trl.put((kind, seed))
        gpus = self._arguments.gpus
        lanes: dict[str, list[str]] = {gpu: [] for gpu in gpus}
        for number, engine in enumerate(engines):
            lanes[gpus[number % len(gpus)]].append(engine)
        threads = [threading.Thread(target=self._work, args=(gpu, lane)) for gpu, lane in lanes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, gpu: str, engines: list[str]) -> None:
        self._take_trl(gpu)
        for engine in engines:
            runs = self._runs(engine)
            if all((kind.folder(self._folder, seed) / "ended").exists() for kind, seed in runs):
                continue
            with self._servers(engine, gpu) as addresses:
                words = [*COMMON, "inference_engine.servers=0", f"inference_engine.addresses=[{','.join(addresses)}]"]
                words += ["placement={training: [0]}"]
                self._run(Kind("warm-up", engine, "async-1"), 99, gpu, [*words, "steps=4"])
                for kind, seed in runs:
                    self._run(kind, seed, gpu, words)
        while self._take_trl(gpu):
            pass

    def _runs(self, framework: str) -> list[tuple[Kind, int]]:
        """Return the runs of a framework that are asked for, with all kinds of one seed before the next seed."""
        rows = self._arguments.rows
        kinds = [kind for kind in KINDS if kind.framework == framework and (not rows or kind.row in rows)]
        return [(kind, seed) for seed in range(self._arguments.seeds) for kind in kinds]

    def _take_trl(self, gpu: str) -> bool:
        with contextlib.suppress(queue.Empty):
            kind, seed = self._trl.get_nowait()
            self._run(kind, seed, gpu, list(COMMON))
            return True
        return False

    def _python(self, framework: str) -> str | None:
        return getattr(self._arguments, framework)

    def _config(self, framework: str) -> str:
        return str(HERE / f"one_gpu_{'vllm' if framework == 'vllm' else 'sglang'}.yaml")

    def _run(self, kind: Kind, seed: int, gpu: str, words: list[str]) -> None:
        own = kind.folder(self._folder, seed)
        if (own / "ended").exists() or time.monotonic() > self._deadline:
            return
        own.mkdir(parents=True, exist_ok=True)
        command = [
            str(self._python(kind.framework)),
            str(HERE / "curve.py"),
            self._config(kind.framework),
            *self._model(),
        ]
        command += [f"steps={self._arguments.steps}", *words, *self._arguments.change]
        command += ["--rows", f"{kind.row}/{seed}", "--output", str(own / "curve.json"), "--folder", str(own)]
        command += ["--limit-s", str(min(self._arguments.run_s, max(1.0, self._deadline - time.monotonic())))]
        command += ["--trl-gpus", gpu, "--trl-python", self._python("trl") or sys.executable]
        began = time.monotonic()
        with (own / "curve.log").open("wb") as log:
            code = subprocess.run(command, env=environment(gpu), stdout=log, stderr=log, check=False).returncode
        if code == 0:
            (own / "ended").touch()
        print(f"{own.name}: {time.monotonic() - began:.0f} s, exit code {code}", flush=True)

    def _model(self) -> list[str]:
        return ["model.source=null", f"model.path={self._arguments.model}"]

    @contextlib.contextmanager
    def _servers(self, engine: str, gpu: str) -> Iterator[list[str]]:
        """Start an engine's servers on a GPU, wait until they answer, and end them afterwards."""
        ports = [31000 + 100 * int(gpu) + number for number in range(SERVERS[engine])]
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        command = [str(self._python(engine)), "-m", "areal_core", "serve", self._config(engine), *self._model()]
        program = "vllm.entrypoints.openai.api_server" if engine == "vllm" else "sglang.launch_server"
        command += [f"inference_engine.program=[{self._python(engine)},-m,{program}]", "--gpus", "0"]
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            for port in ports:
                log = stack.enter_context((self._folder / f"{engine}-{port}.log").open("wb"))
                server = subprocess.Popen([*command, "--port", str(port)], env=environment(gpu), stdout=log, stderr=log)
                stack.callback(end, server)
            for address, each in zip(addresses, range(len(ports)), strict=True):
                wait_until_ready(address, began + READY_S)
                print(f"{engine} {each} answers after {time.monotonic() - began:.0f} s", flush=True)
            yield addresses


def environment(gpu: str) -> dict[str, str]:
    """Return the variables of a process that uses one GPU; each interpreter finds its own packages."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)
    return variables


def end(server: subprocess.Popen[bytes]) -> None:
    """End `areal serve`, which ends its server."""
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()


def wait_until_ready(address: str, deadline: float) -> None:
    """Wait for a server's first healthy answer.

    Raises:
        TimeoutError: it did not answer in time.
    """
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(1)
    raise TimeoutError(f"{address} did not answer within {READY_S:.0f} s: see its log")


def reach(points: list[dict[str, float]], score: float) -> float | None:
    """Return the seconds until a held-out score was reached; None if it never was."""
    return next((second for second, value in scores(points) if value >= score), None)


def report(folder: Path, score: float) -> None:
    """Print the table in Markdown, draw the chart, and write the points of all runs as JSON."""
    curves: dict[str, list[dict[str, float]]] = {}
    heads = ["run", "seeds", "samples/s", "waits/trains/syncs, s", "GPU busy", "GiB"]
    heads += ["held-out at 20, 40, end", f"s to {score:g}", "median"]
    print(" | ".join(heads), "---|" * (len(heads) - 1) + "---", sep="\n")
    for kind in KINDS:
        found: list[dict[str, Any]] = []
        for own in sorted(folder.glob(f"{kind.framework}-{kind.row}-*")):
            lines = steps_of(folder, own.name)
            if len(lines) < 12 or own.name.endswith("-99"):
                continue
            points = points_of(lines, without_evaluations=kind.framework == "trl")
            curves[f"{kind.title}/{own.name.rpartition('-')[2]}"] = points
            busiest: dict[str, float] = {}
            if (results := own / "curve.json").is_file():
                watched = json.loads(results.read_text())["gpus"].values()
                busiest = max((gpu for row in watched for gpu in row.values()), key=lambda gpu: gpu["busy"], default={})
            found.append({**describe(lines), "seconds": reach(points, score), "gpu": busiest, "scores": scores(points)})
        if found:
            print(" | ".join(_cells(kind.title, found)))
    (folder / "points.json").write_text(json.dumps(curves))
    if curves:
        (folder / "chart.svg").write_text(draw(curves, titles={kind.title: kind.title for kind in KINDS}))


def _cells(title: str, found: list[dict[str, Any]]) -> list[str]:
    reached = [one["seconds"] for one in found]
    median = statistics.median_high([float("inf") if second is None else second for second in reached])
    ends = [[one["held out"].get(step) for step in (20, 40)] + [one["scores"][-1][1]] for one in found]
    return [
        title,
        str(len(found)),
        ", ".join(f"{one['samples/s']:.0f}" for one in found),
        "; ".join(one["parts"] for one in found),
        ", ".join(f"{one['gpu'].get('busy', float('nan')):.2f}" for one in found),
        ", ".join(f"{one['gpu'].get('gib', float('nan')):.0f}" for one in found),
        "; ".join(" ".join("-" if each is None else f"{each:.2f}" for each in one) for one in ends),
        ", ".join("never" if second is None else f"{second:.0f}" for second in reached),
        "never" if median == float("inf") else f"{median:.0f}",
    ]


def main() -> None:
    """Make the runs that are asked for, then report all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="names in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", nargs="+", default=[], choices=sorted({kind.row for kind in KINDS}))
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="of the config, for every run")
    parser.add_argument("--score", type=float, default=0.5, help="held-out score whose seconds are reported")
    parser.add_argument("--run-s", type=float, default=600.0, help="limit of one run")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="after which no run begins or goes on")
    for framework in (*SERVERS, "trl"):
        parser.add_argument(f"--{framework}", help="its interpreter")
    arguments = parser.parse_args()
    leave_when_asked()
    if arguments.model is not None:
        Bench(arguments).make()
    report(arguments.folder.resolve(), arguments.score)


if __name__ == "__main__":
    main()
