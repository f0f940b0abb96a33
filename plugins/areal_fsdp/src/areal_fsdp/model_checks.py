"""Checks for `areal doctor MODEL`: set up small copies of a model, and report how this engine would train it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.models import Dtype, small_copy_of, try_dtypes
from areal_core.plugins import Finding
from areal_core.sdk import ACTOR
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

_LAYOUTS = {"tensor": {"tensor": 2}, "expert": {"expert": 2}}
_RANKS = 2
_INTERVAL_S = 0.1


def check_train(folder: Path) -> Finding:
    """Report the rung that the model uses in each dtype, and why the rungs above it failed."""
    return try_dtypes(folder, _rung)


def _rung(path: Path, dtype: Dtype) -> tuple[bool, str]:
    engine = _set_up(path, dtype)
    assert engine._choice is not None
    rung, reasons = engine._choice
    engine.close()
    return True, rung + (f", because {'; '.join(reasons)}" if reasons else "")


def check_adapter(folder: Path) -> Finding:
    """Report the matrices that `adapter: {}` adapts, and the parts of the layers that stay frozen."""
    try:
        with small_copy_of(folder) as (path, how):
            engine = _set_up(path, adapter={"rank": 1, "alpha": 1})
            assert engine._adapter is not None
            kinds, frozen = engine._adapter.kinds, engine._adapter.frozen
            engine.close()
    except RunError as error:
        return Finding(True, f"no: {'; '.join([error.message, *error.hints])}")
    return Finding(True, f"{how}on {', '.join(kinds)}" + (f"; frozen are {', '.join(frozen)}" if frozen else ""))


def check_parallel(folder: Path) -> Finding:
    """Report whether two ranks can divide the layers (`parallel.tensor`) and the experts (`parallel.expert`)."""
    try:
        with small_copy_of(folder) as (path, how), tempfile.TemporaryDirectory() as output_folder:
            succeeded, output = _run_ranks(path, Path(output_folder))
    except RunError as error:
        return Finding(True, f"no: {error.message}")
    last = (output.strip().splitlines() or ["a rank died"])[-1]
    if not succeeded:
        return Finding(False, last)
    results: dict[str, str] = json.loads(last)
    return Finding(True, how + "; ".join(f"{name}: {result}" for name, result in results.items()))


def _run_ranks(path: Path, output_folder: Path) -> tuple[bool, str]:
    """Run all ranks, and kill the others if one fails.

    Ranks write to files, because a full pipe would block a rank that another one waits for.

    Returns:
        True and the output of rank 0, or False and the errors of the first failed rank.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, str(path), str(output_folder / "store")]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(_RANKS):
            out_path, err_path = (output_folder / f"{number}.{suffix}" for suffix in ("out", "err"))
            with out_path.open("w") as out, err_path.open("w") as err:
                ranks.append(subprocess.Popen([*command, str(number)], stdout=out, stderr=err, env=environment))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(_INTERVAL_S)
    finally:
        failed = [number for number, rank in enumerate(ranks) if rank.returncode]
        for rank in ranks:
            rank.kill()
            rank.wait()
    file = output_folder / (f"{failed[0]}.err" if failed else "0.out")
    return not failed, file.read_text(errors="replace")


def _set_up(path: Path, dtype: Dtype = "float32", **settings: Any) -> FSDPEngine:
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-5, **settings))
    engine.setup(ModelReference(str(path), dtype), ACTOR, OptimizerSettings(total_updates=1, temperature=1.0))
    return engine


def _run_rank(path: Path, store: str, rank: int) -> None:
    """Set up an engine with each parallelism, and print the results: setup compares it with the whole model."""
    file = dist.FileStore(store, _RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=100))
    results = {}
    for name, parallel in _LAYOUTS.items():
        try:
            _set_up(path, parallel=parallel).close()
            results[name] = "yes"
        except RunError as error:
            results[name] = f"no ({error.message})"
    sys.stdout.write(f"\n{json.dumps(results)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _run_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
