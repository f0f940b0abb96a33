"""What one of several ranks does in `test_ranks.py`: python rank_program.py RANK RANKS STORE MODEL FOLDER CONFIG.

Rank r writes `rank{r}.pt` into FOLDER: gradients, metrics, outputs, parameters, by name. CONFIG is JSON.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from areal_core.data import Metric, PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, EMA, REFERENCE, LossResult, LossSpec, Role
from areal_deepspeed.config import DeepSpeedConfig
from areal_deepspeed.engine import DeepSpeedEngine
from areal_testing.conformance import numbers_of

OUTPUTS = ["logprobs", "entropy"]
AVERAGE = Role("average", ema=EMA(ACTOR.name, decay=0.5))


def make_batch(lengths=(9, 30, 3, 12, 12, 1, 25, 7), vocabulary=61):
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths)
    tokens = {
        "input_ids": torch.randint(vocabulary, (total,), generator=generator),
        "loss_mask": torch.rand(total, generator=generator) < 0.7,
        "advantages": torch.randn(total, generator=generator),
    }
    rows = torch.arange(len(lengths))
    batch = PackedBatch(Ragged(torch.tensor(lengths), tokens), {"group_id": rows // 2, "episode_id": rows})
    batch = shift_to_predictions(batch)
    return batch.with_tokens(loss_weights=batch["loss_mask"].float() / batch["loss_mask"].sum())


def policy_loss(batch, outputs):
    each = -batch["advantages"] * outputs["logprobs"] - 0.1 * outputs["entropy"]
    loss = (batch["loss_weights"] * each).sum()
    return LossResult(loss, {"tokens": Metric.sum(batch["loss_mask"]), "rows": Metric.sum(float(len(batch)))})


def hidden_loss(part, outputs):
    """Reads one of the outputs that it has asked for, which is not computed by the head."""
    return LossResult((outputs["hidden"].square().mean(-1) * part["loss_weights"]).sum())


def train(engine, batch, loss=policy_loss, outputs=OUTPUTS):
    """One update; its metrics as numbers."""
    return numbers_of(engine.train([LossSpec("any", batch, outputs, loss)]))


def gradients_of(engine, batch, loss=policy_loss, outputs=OUTPUTS):
    """Gradients and metrics of one `train`, before its update, which follows."""
    import deepspeed

    found, update = {}, engine._update

    def look(rate):
        for name, parameter in engine._module.model.named_parameters():
            found[name] = deepspeed.utils.safe_get_full_grad(parameter).to("cpu", torch.float32, copy=True)
        return update(rate)

    engine._update = look
    metrics = train(engine, batch, loss, outputs)
    engine._update = update
    return found, metrics


def parameters_of(engine):
    return {name: parameter.to("cpu", copy=True) for name, parameter in engine.named_full_parameters()}


def start(model, config, role=ACTOR, temperature=0.7, dtype="float32", **settings):
    """An engine that is ready, with micro-batches of few tokens, so that ranks have different numbers of them."""
    rate = {} if "lr" in config.get("optimizer", {}).get("params", {}) else {"learning_rate": 1e-3}
    engine = DeepSpeedEngine(DeepSpeedConfig(config=config, **{**rate, "max_tokens_per_microbatch": 20, **settings}))
    engine.setup(ModelReference(str(model), dtype), role, OptimizerSettings(total_updates=100, temperature=temperature))
    return engine


def learn(model, config, batch):
    """What an actor computes and becomes in several updates."""
    results = {}
    engine = start(model, config)
    results["outputs"] = engine.forward(batch, OUTPUTS)
    results["gradients"], results["metrics"] = gradients_of(engine, batch)
    results["idle"], results["idle_metrics"] = gradients_of(engine, batch.select([1]))
    results["hidden"], _ = gradients_of(engine, batch.select([1]), hidden_loss, ["logprobs", "hidden", "topk:3"])
    results["clipped"] = train(engine, batch)
    results["parameters"] = parameters_of(engine)
    return engine, results


def others(model, config, batch, engine):
    """Frozen roles, an EMA, and a critic."""
    results = {}
    average = start(model, config, AVERAGE)
    average.update_ema(engine, 0.5)
    results["average"] = parameters_of(average)
    average.close()
    for role in (REFERENCE, CRITIC):
        other = start(model, config, role)
        results[role.name] = other.forward(batch, ["values"] if role is CRITIC else OUTPUTS)
        other.close()
    return results


def main():
    rank, ranks, store, model, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    store = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    config, batch = json.loads(sys.argv[6]), make_batch()
    engine, results = learn(model, config, batch)
    results |= others(model, config, batch, engine)
    engine.save(Path(folder) / "checkpoint")
    results["next"] = train(engine, batch)
    results["then"] = parameters_of(engine)
    engine.load(Path(folder) / "checkpoint")
    results["next_again"] = train(engine, batch)
    results["then_again"] = parameters_of(engine)
    fresh = start(model, config)
    fresh.load(Path(folder) / "checkpoint")
    results["next_elsewhere"] = train(fresh, batch)
    results["then_elsewhere"] = parameters_of(fresh)
    results["poisoned"] = train(fresh, batch, lambda b, o: LossResult(o["logprobs"].sum() * torch.nan))
    results["unpoisoned"] = parameters_of(fresh)
    try:
        fresh.load(Path(folder) / "single")
    except RunError as error:
        results["refused"] = str(error)
    engine.export(Path(folder) / "export")
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    engine.close()
    fresh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
