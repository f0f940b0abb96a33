"""Reward and held-out score against the clock, asynchronous, synchronous and TRL: one config, a run for each row.

    python benchmarks/curve.py CONFIG --rows sync async-2 --output curve.json [section.key=value ...]
    python benchmarks/curve.py --output curve.json --chart curve.svg        # table and chart of what is there

A row is `sync` or `async-N`, where N is the bound on staleness, and may name a seed: `async-2/1`. `trl` and
`trl-async-N` are TRL's trainers on the same task (`trl_curve.py`), in the environment of `--trl-python` and on the
first GPU of `--trl-gpus`; their vLLM server is running already. `trl-colocated` generates and trains on all of them by
turns, without a server. Everything else is the config's, with the overrides of the command line laid over it, the same
for every row. Where `areal serve` has a server running, `inference_engine.servers=0
inference_engine.addresses=[http://...]` spares each row the start of its own; the run brings that server back to the
weights that it begins with.

The clock starts when generation may begin: models are loaded and servers ready, the evaluation before the first step is
counted, and so are all later ones, during which an asynchronous run goes on generating. TRL's trainer stands still
meanwhile, so that the seconds of its evaluations are left out. `--warm-up STEPS` makes a run first whose points are
thrown away, so that no row of areal's pays for compiled graphs that the next one finds in a cache.

`--output` is written anew while a row goes on. Rows are added to those of the same config and overrides; one that is
there is not run again. One that ended early (`--limit-s`, Ctrl-C, a failure) is named, is in no table and no chart, and
begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asynchronous import machine, read_metrics
from curve_chart import draw
from curve_gpus import GPUWatch
from curve_table import by_time, table
from run_ends import RUN_VARIABLE, end_run, leave_when_asked

AREAL = [sys.executable, "-m", "areal_core"]
KEPT = (
    "reward/mean",
    "reward/groups_all_equal",
    "evaluation/reward",
    "staleness/mean",
    "staleness/tokens_over_bound",
    "batch/sequences",
    "batch/tokens",
    "batch/response_length",
    "batch/truncated",
    "time/step_s",
    "time/wait_s",
    "time/train_s",
    "time/weight_sync_s",
    "time/evaluate_s",
    "train/entropy",
    "train/gradient_norm",
    "logprob_check/difference_mean",
)
"""Of a step's metrics; what a run does not report is left out."""
POLL_S = 0.5


def row_name(text: str) -> str:
    """A row of the command line.

    Raises:
        argparse.ArgumentTypeError: there is no such row.
    """
    if not re.fullmatch(r"(sync|trl|trl-colocated|(trl-)?async-[1-9]\d*)(/\d+)?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no row: sync, async-2, trl, trl-colocated or trl-async-2, with a seed: async-2/1"
        )
    return text


def overrides(row: str) -> list[str]:
    """What makes a row of the config."""
    way, _, seed = row.partition("/")
    bound = int(way.rpartition("-")[2]) if "async-" in way else 0
    # One batch beyond the bound may be in the pipeline: with a bound of 0 that is the one that is waited for.
    words = [f"rollout.max_staleness={bound}", f"rollout.max_pending_batches={bound + 1}"]
    return [*words, f"seed={int(seed)}"] if seed else words


def points_of(lines: list[dict[str, float]], *, without_evaluations: bool = False) -> list[dict[str, float]]:
    """The points of a row from the journal of its run; the first is the evaluation before the first step, if any."""
    points: list[dict[str, float]] = []
    left_out = 0.0
    for line in lines:
        if not points:
            begin = line["time"] - (line.get("time/evaluate_s", 0.0) if line["step"] == 0 else line["time/step_s"])
        left_out += line.get("time/evaluate_s", 0.0) if without_evaluations else 0.0
        seconds = line["time"] - begin - left_out
        kept = {key: line[key] for key in KEPT if key in line}
        points.append({"step": line["step"], "seconds": seconds, "wall": line["time"], **kept})
    return points


class Curves:
    """Runs rows and keeps their points.

    Args:
        arguments: of the command line.
        folder: for run folders and logs.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        output: Path = arguments.output
        self.results: dict[str, Any] = {"rows": {}, "unfinished": {}, "gpus": {}}
        if output.is_file():
            self.results |= json.loads(output.read_text())

    @property
    def settings(self) -> list[str]:
        """What all rows of a file have in common."""
        return [str(self._arguments.config), *self._arguments.overrides]

    def warm_up(self, steps: int) -> bool:
        """Have everything compiled that is compiled once on a machine; whether it went well."""
        return self._run("warm-up", [*overrides("async-1"), f"steps={steps}"], lambda lines: None) == 0

    def measure(self, row: str) -> bool:
        """Run a row; whether it came to its end."""
        points: list[dict[str, float]] = []

        def keep(lines: list[dict[str, float]]) -> None:
            points[:] = points_of(lines, without_evaluations=row.startswith("trl"))
            self.results["unfinished"][row] = points
            self.save()

        self.results |= {"settings": self.settings, "machine": machine()}
        with GPUWatch() as gpus:
            code = self._run(file_name(row), overrides(row), keep)
        if code == 0 and points:
            self.results["rows"][row] = self.results["unfinished"].pop(row)
            self.results["gpus"][row] = gpus.found(points)
            self.save()
        return code == 0

    def save(self) -> None:
        """Write the results, whole or not at all."""
        output: Path = self._arguments.output
        fresh = output.with_name(f".{output.name}.new")
        fresh.write_text(json.dumps(self.results))
        fresh.replace(output)

    def _run(self, name: str, words: list[str], take: Any) -> int | None:
        """Start a run, hand on its journal as it grows, and wait; its exit code, or None where it was ended early."""
        run_dir, given = self._folder / name, self._arguments
        run_words = [str(given.config), *given.overrides, *words]
        command, variables = [*AREAL, "run", *run_words, f"run_dir={run_dir}"], environment(run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)  # of a row that is measured anew
        if name.startswith("trl"):
            is_colocated = name.startswith("trl-colocated")
            gpus = given.trl_gpus.split(",")[: None if is_colocated else 1]
            ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
            command = [given.trl_python, *(ranks if len(gpus) > 1 else [])]
            command += [str(Path(__file__).with_name("trl_curve.py")), *run_words]
            command += ["--metrics", str(run_dir / "metrics.jsonl")]
            command += ["--asynchronous"] if name.startswith("trl-async") else []
            command += ["--colocated"] if is_colocated else []
            variables |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        deadline, seen = time.monotonic() + self._arguments.limit_s, 0
        with (self._folder / f"{name}.log").open("wb") as log:
            run = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            while (code := run.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL_S)
                lines = read_metrics(run_dir / "metrics.jsonl")
                if len(lines) > seen:
                    seen = len(lines)
                    take(lines)
            take(read_metrics(run_dir / "metrics.jsonl"))
        finally:
            end_run(run, run_dir)
        return code


def environment(run_dir: Path) -> dict[str, str]:
    """Of a run: with one thread for each process, unless something else was asked for."""
    return {"OMP_NUM_THREADS": "1", **os.environ, RUN_VARIABLE: str(run_dir)}


def file_name(row: str) -> str:
    """Of a row's folder and log."""
    return row.replace("/", "-seed-")


def main() -> int:
    """Run the rows that are asked for, then print the table and draw the image of all that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", help="of the runs; without it nothing is run")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every row")
    parser.add_argument("--rows", nargs="+", type=row_name, default=["sync", "async-2"], help="in this order")
    parser.add_argument("--output", type=Path, required=True, help="JSON with the points of all rows; rows are added")
    parser.add_argument("--chart", type=Path, help="SVG to draw")
    parser.add_argument("--folder", type=Path, help="for run folders and logs; by default a new one is made")
    parser.add_argument("--warm-up", type=int, default=0, help="steps of a run before the first row; 0 is none")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which a row is ended as it stands")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter of TRL's environment")
    parser.add_argument("--trl-gpus", help="of TRL's trainer, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between columns of the second table")
    arguments = parser.parse_intermixed_args()
    if arguments.config is None and not arguments.output.is_file():
        parser.error(f"there is neither a CONFIG to run nor a file {arguments.output}")
    if any(row.startswith("trl") for row in arguments.rows) and not (
        arguments.trl_gpus and shutil.which(arguments.trl_python)
    ):
        parser.error("TRL's rows need --trl-gpus, or its trainer would take all of them, and --trl-python")
    leave_when_asked()
    failed = run_rows(arguments, parser) if arguments.config is not None else []
    results = json.loads(arguments.output.read_text())
    if rows := results["rows"]:
        print(table(rows, results.get("gpus", {})))
        print(f"\n{by_time(rows, arguments.every_s)}\n")
        if arguments.chart is not None:
            arguments.chart.write_text(draw(rows))
    for row, points in results.get("unfinished", {}).items():
        print(f"left out: {row}, which ended early after {len(points)} points")
    print(json.dumps(results.get("machine", {})))
    return 1 if failed else 0


def run_rows(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Run the rows that are not there yet; those that did not come to their end."""
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="areal-curve-"))
    folder.mkdir(parents=True, exist_ok=True)
    curves = Curves(arguments, folder.resolve())
    others = curves.results.get("settings", curves.settings)
    if curves.results["rows"] and others != curves.settings:
        parser.error(f"{arguments.output} has rows of other settings, {' '.join(others)}: take another file or FOLDER")
    failed: list[str] = []
    missing = set(arguments.rows) - set(curves.results["rows"])
    has_ours = any(not row.startswith("trl") for row in missing)
    if arguments.warm_up and has_ours and not curves.warm_up(arguments.warm_up):
        failed.append("warm-up")
        print(f"the warm-up failed, see {folder}/warm-up.log; the rows go on", flush=True)
    for row in arguments.rows:
        if row in curves.results["rows"]:
            print(f"{row} is in {arguments.output} already", flush=True)
            continue
        began = time.monotonic()
        has_ended = curves.measure(row)
        failed += [] if has_ended else [row]
        told = "with start and end" if has_ended else f"did not come to its end, see {folder}/{file_name(row)}.log"
        print(f"{row}: {time.monotonic() - began:.0f} s, {told}", flush=True)
    curves.save()
    return failed


if __name__ == "__main__":
    sys.exit(main())
