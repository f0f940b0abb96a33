"""Run one rank of `test_ranks.py`: python rank_program.py RANK RANKS STORE MODEL FOLDER SETTINGS.

Rank r writes `rank{r}.pt` into FOLDER: gradients, metrics, outputs, parameters, by name.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from areal_core.data import Metric, PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR, CRITIC, REFERENCE, LossResult, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.models import compiling
from areal_testing.conformance import numbers_of
from areal_testing.conformance.training_session import check_description

OUTPUTS = ["logprobs", "entropy"]


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


def train(engine, batch, loss=policy_loss, outputs=OUTPUTS):
    """Make an update, and return its metrics as numbers."""
    return numbers_of(engine.train([LossSpec("any", batch, outputs, loss)]))


def make_pairs():
    """Return the batch with units of two sequences that are far apart."""
    batch = make_batch()
    return batch.with_units(torch.arange(len(batch)) % (len(batch) // 2), margin=torch.arange(4.0))


def train_pairs(engine):
    """Make an update on the pairs; return metrics, and the `episode_id`s of each unit that the loss got."""
    seen = []

    def watch(part, outputs):
        ids = part["episode_id"].tolist()
        seen.extend(
            (float(margin), sorted(ids[row] for row in rows))
            for margin, rows in zip(part["margin"], part.unit_rows, strict=True)
        )
        return policy_loss(part, outputs)

    return train(engine, make_pairs(), watch), seen


def uneven_loss(rank):
    """Return a loss that logs metrics of every kind with names that no other rank has."""

    def loss(batch, outputs):
        result = policy_loss(batch, outputs)
        own = {
            f"mean_of_{rank}": Metric.mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])),
            f"sum_of_{rank}": Metric.sum(float(rank + 1)),
            f"maximum_of_{rank}": Metric.maximum(-1.0 - rank),
            f"histogram_of_{rank}": Metric.histogram(batch["advantages"].new_tensor([-1.0, 1.0, 2.0, 3.0]), (0.0,)),
        }
        return LossResult(result.loss, {**result.metrics, **own})

    return loss


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients_of(engine, batch, loss=policy_loss, outputs=OUTPUTS):
    """Return gradients and metrics of `train`, without an update."""
    found = {}

    def keep(rate):
        learned = [name for name in engine._parameters if "e_score_correction_bias" not in name]
        gradients = zip(learned, engine._gradients(), strict=True)
        found.update({name: whole(gradient).to("cpu", copy=True) for name, gradient in gradients})
        engine._optimizers[0].zero_grad()
        engine._module.zero_grad()
        return {}

    update, engine._update = engine._update, keep
    metrics = train(engine, batch, loss, outputs)
    engine._update = update
    return found, metrics


def hidden_loss(part, outputs):
    """Return a loss that reads only hidden states, although other outputs are requested."""
    return LossResult((outputs["hidden"].square().mean(-1) * part["loss_weights"]).sum())


def with_tops(batch, vocabulary=61):
    """Return the batch with three tokens for each position, which may be anywhere in the vocabulary."""
    generator = torch.Generator().manual_seed(3)
    top_ids = torch.randint(vocabulary, (batch.token_count, 3), generator=generator, dtype=torch.int32)
    return batch.with_tokens(top_ids=top_ids, coefficients=torch.randn(top_ids.shape, generator=generator))


def top_loss(part, outputs):
    """Return a loss that reads the log-probabilities of the three tokens, and of the target."""
    each = (part["coefficients"] * outputs["top_logprobs"]).sum(-1) - outputs["logprobs"]
    return LossResult((part["loss_weights"] * each).sum())


def compared(engine, other, batch):
    """Return the divergence from another engine for each token, and the gradients of a loss with it."""
    name = f"divergence:{REFERENCE.name}:0.5"
    engine.compare_with({"any": engine, REFERENCE.name: other})

    def loss(part, outputs):
        result = policy_loss(part, outputs)
        return LossResult(result.loss + (part["loss_weights"] * outputs[name]).sum(), result.metrics)

    column = engine.forward(batch, [name])[name]
    return {"column": column, **gradients_of(engine, batch, loss, [*OUTPUTS, name])[0]}


def with_choices(engine, batch, missing=()):
    """Return the batch with random experts for each token, except in sequences `missing`; already shifted."""
    routers = engine._routing._routers
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(batch.token_count, len(routers), routers[0].num_experts, generator=generator)
    choices = (drawn.argsort(-1)[..., : routers[0].top_k] + 1).to(torch.uint8)
    choices[batch.tokens.offsets[1:] - 1] = 0  # the last position of a sequence predicts nothing
    choices[torch.isin(batch.tokens.row_index, torch.tensor(missing, dtype=torch.int64))] = 0
    return batch.with_tokens(routed_experts=choices)


def parameters_of(engine):
    check_description(engine)
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.named_full_parameters()}


def main():
    rank, ranks, store, model, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    layout = {"max_tokens_per_microbatch": 31, **json.loads(sys.argv[6])}
    compiling.BACKEND = "aot_eager"  # the compiler's graphs, without its code generator
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    results = {}
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-3, **layout))
    engine.setup(ModelReference(model), ACTOR, OptimizerSettings(total_updates=100, temperature=0.7))
    batch = make_batch()
    results["leads"] = engine._ranks.leads
    results["gradients"], results["metrics"] = gradients_of(engine, batch)
    results["idle"], results["idle_metrics"] = gradients_of(engine, batch.select([1]))
    if engine._routing._routers:
        chosen = with_choices(engine, batch, missing=[2, 6])
        results["replayed"] = gradients_of(engine, chosen), engine.forward(chosen, OUTPUTS)
    other = FSDPEngine(FSDPConfig(**layout))
    other.setup(ModelReference(model), REFERENCE, OptimizerSettings(total_updates=100, temperature=1.3))
    results["compared"] = compared(engine, other, batch)
    results["compared_idle"] = compared(engine, other, batch.select([1]))
    other.close()
    for part in (batch, batch.select([1])):
        results[f"hidden of {len(part)}"], _ = gradients_of(engine, part, hidden_loss, ["logprobs", "hidden", "topk:3"])
    for part in (batch, batch.select([1])):
        results[f"tops of {len(part)}"] = gradients_of(engine, with_tops(part), top_loss, [*OUTPUTS, "top_logprobs"])
        results[f"squares of {len(part)}"] = engine.forward(part, ["logprobs", "sum_pi_squared"])
    results["outputs"] = engine.forward(batch, OUTPUTS)
    results["idle_outputs"] = engine.forward(batch.select([1]), OUTPUTS)
    results["steps"] = [train(engine, batch) for _ in range(2)]
    results["updates"] = int(engine._updates)
    engine.save(Path(folder) / "checkpoint")
    write = engine.snapshot()
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write, Path(folder) / "snapshot")
        results["third"] = train(engine, batch)
        writing.result()
    results["parameters"] = parameters_of(engine)
    engine.load(Path(folder) / "checkpoint")
    results["third_again"] = train(engine, batch)
    results["parameters_again"] = parameters_of(engine)
    engine.load(Path(folder) / "snapshot")
    results["third_from_snapshot"] = train(engine, batch)
    results["poisoned"] = train(engine, batch, lambda b, o: LossResult(o["logprobs"].sum() * torch.nan))
    results["parameters_unpoisoned"] = parameters_of(engine)
    engine.export(Path(folder) / "export")
    if (Path(folder) / "single").exists():
        engine.load(Path(folder) / "single")
        results["from_single"] = parameters_of(engine)
    results["uneven"] = train(engine, batch, uneven_loss(rank))
    results["uneven_and_idle"] = train(engine, batch.select([1]), uneven_loss(rank))
    results["pairs"], results["units"] = train_pairs(engine)
    for role in (REFERENCE, CRITIC):
        other = FSDPEngine(FSDPConfig(**layout))
        other.setup(ModelReference(model), role, OptimizerSettings(total_updates=100, temperature=0.7))
        results[role.name] = other.forward(batch, ["values"] if role is CRITIC else OUTPUTS)
        if role is CRITIC:
            results["hidden of a critic"], _ = gradients_of(other, batch.select([1]), hidden_loss, ["values", "hidden"])
        other.close()
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
