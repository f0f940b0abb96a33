"""Run one rank of `test_optimizers.py`: python optimizer_rank_program.py RANK FOLDER MODEL OPTIMIZER.

Rank r writes `rank{r}.pt` into FOLDER: parameters after four updates, and again from a checkpoint after two. Rank 0
then writes `single.pt`: the same of one process, and the parameters before the first update.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_program import make_batch, parameters_of, train

from areal_core.config import select
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR
from areal_fsdp.engine import FSDPEngine


def make(model, name):
    settings = {"type": "fsdp/fsdp", "optimizer": name, "learning_rate": 1e-3, "max_tokens_per_microbatch": 31}
    engine = FSDPEngine(select("train_engines", settings).settings)
    engine.setup(ModelReference(model), ACTOR, OptimizerSettings(100, 1.0))
    return engine


def main():
    rank, folder, model, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    engine, results, batch = make(model, name), {}, make_batch()
    for number in range(4):
        if number == 2:
            engine.save(folder / "checkpoint")
        train(engine, batch)
    results["parameters"] = parameters_of(engine)
    engine.load(folder / "checkpoint")
    for _ in range(2):
        train(engine, batch)
    results["again"] = parameters_of(engine)
    torch.save(results, folder / f"rank{rank}.pt")
    engine.close()
    dist.destroy_process_group()
    if rank == 0:
        engine = make(model, name)
        results = {"before": parameters_of(engine)}
        for _ in range(4):
            train(engine, batch)
        results["parameters"] = parameters_of(engine)
        engine.load(folder / "checkpoint")  # a checkpoint of two ranks continues on one
        for _ in range(2):
            train(engine, batch)
        results["again"] = parameters_of(engine)
        torch.save(results, folder / "single.pt")


if __name__ == "__main__":
    main()
