"""What two ranks make of each tiny family, in values and gradients: with tensor and with expert parallelism.

    python two_ranks.py RANK FOLDER

FOLDER has a folder for each family, which `prepare` wrote. Rank 0 writes `results.json` there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import small_models
import torch
import torch.distributed as dist

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable

RANKS = 2
LAYOUTS = {"tensor": {"tensor": RANKS}, "expert": {"expert": RANKS}}
EQUAL = "yes"
"""What stands in the results for a family that is computed exactly; others have the reason for which it is refused."""


def prepare(family: str, folder: Path) -> None:
    """Write a model whose vocabulary ranks can divide, and what transformers makes of it on one rank."""
    words = [name for name in small_models.FAMILIES[family] if name.startswith("vocab_size")]
    small_models.make_model(family, folder / family, **dict.fromkeys(words, small_models.VOCABULARY + 1))
    torch.save(small_models.reference(folder / family, small_models.make_batch()), folder / family / "wanted.pt")


def measure(families: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return for each family, and each of `LAYOUTS`, `EQUAL` or the reason for which it is refused.

    Raises:
        AssertionError: a rank found a difference from transformers, or failed.
    """
    for family in families:
        prepare(family, folder)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(rank), str(folder)] for rank in range(RANKS)]
    log = [(folder / f"rank{rank}.log").open("w") for rank in range(RANKS)]
    processes = [
        subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**environment, "LOCAL_RANK": command[2]})
        for command, file in zip(commands, log, strict=True)
    ]
    try:
        for process in processes:
            code = process.wait(600)
            assert code == 0, (folder / f"rank{processes.index(process)}.log").read_text()[-3000:]
    finally:
        for process, file in zip(processes, log, strict=True):
            process.kill()
            file.close()
    results: dict[str, dict[str, str]] = json.loads((folder / "results.json").read_text())
    return results


def _compare(folder: Path, parallel: dict[str, int]) -> str:
    batch = small_models.make_batch()
    wanted, wanted_gradients = torch.load(folder / "wanted.pt")
    try:
        engine = small_models.set_up(folder, parallel=parallel)
    except RunError as error:
        return str(error).splitlines()[0]
    try:
        values = engine.forward(batch, ["logprobs"])["logprobs"]
        assert small_models.distance(values, wanted) < small_models.TOLERANCE, f"values of {folder.name}, {parallel}"
        found = small_models.gradients(engine, batch)
    finally:
        engine.close()
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        error = float((found.get(name, torch.zeros_like(gradient)) - gradient).abs().max()) / largest
        assert error < small_models.GRADIENT_TOLERANCE, f"gradient of {name} of {folder.name}, {parallel}: {error:.2g}"
    return EQUAL


def main() -> None:
    """Compute all families of a folder, as one of the ranks."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    results = {
        place.parent.name: {name: _compare(place.parent, parallel) for name, parallel in LAYOUTS.items()}
        for place in sorted(folder.glob("*/wanted.pt"))
    }
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
