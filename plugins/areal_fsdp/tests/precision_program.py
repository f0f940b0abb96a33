"""Run one of two ranks of `test_precision.py`: python precision_program.py RANK MODEL FOLDER.

Rank r writes `rank{r}.pt` into FOLDER.
"""

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_program import gradients_of, make_batch, parameters_of, train

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine


def main():
    rank, model, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    logged = []
    logger = logging.getLogger("areal_fsdp.parallel.loading")
    logger.addFilter(lambda record: logged.append(record.getMessage()) or True)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-3))
    engine.setup(ModelReference(model, "bfloat16"), ACTOR, OptimizerSettings(total_updates=100, temperature=1.0))
    batch = make_batch()
    results = {"log": logged, "stored": parameters_of(engine)}
    results["buffers"] = dict(engine._module.model.named_buffers())
    results["outputs"] = engine.forward(batch, ["logprobs"])["logprobs"]
    results["gradients"], _ = gradients_of(engine, batch)
    results["gradient_norm"] = train(engine, batch)["gradient_norm"]
    results["trained"] = parameters_of(engine)
    engine.save(folder / "checkpoint")
    engine.export(folder / "export")
    train(engine, batch)
    engine.load(folder / "checkpoint")
    results["resumed"] = parameters_of(engine)
    torch.save(results, folder / f"rank{rank}.pt")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
