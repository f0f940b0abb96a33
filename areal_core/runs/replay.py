"""A step of a run, computed again on this machine from the trajectories that the run has kept.

A replay begins with the last checkpoint before the step, or with the initial model, and trains on the batches since
then in one process. It writes nothing into the checkpoints, the ledger or the metrics of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from areal_core.config import load_run
from areal_core.config.needs import roles_of
from areal_core.data import FinishReason
from areal_core.errors import RunError, UsageError
from areal_core.files import KeptSources
from areal_core.ledger.store import DATABASE, read_consumption
from areal_core.messages.rollouts import Manifest
from areal_core.runs.models import model_reference
from areal_core.runs.ranks import only_rank
from areal_core.runs.trainer import build_engines
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.rpc import encode_frame
from areal_core.training.batches import read_batch
from areal_core.training.checkpoint import restore_checkpoint
from areal_core.training.learner import Learner
from areal_core.training.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.config import Resolved
    from areal_core.data import PackedBatch
    from areal_core.interfaces.training import TrainEngine
    from areal_core.ledger.store import Consumption

DIMENSIONS = {"data": None, "replicas": 1, "context": 1, "tensor": 1, "expert": 1}
"""Settings of an engine's `parallel` that divide work over ranks, with their values for one rank."""


@dataclass(frozen=True)
class Replay:
    """A step that was computed again.

    Attributes:
        step: the step, from 1 as in the metrics.
        begin: steps in the checkpoint that the replay began with; 0 for the initial model.
        metrics: metrics of the step, by the names that the run uses.
        batch: all sequences of the step with what the losses computed of their tokens, as plugins get some of them from
            the hook `areal_batch_logged`. Per-token values stand at the position before the token that they belong to.
        difference: largest difference between the policy's parameters after the step and those in the checkpoint that
            the run wrote after the same step; None if there is no such checkpoint.
    """

    step: int
    begin: int
    metrics: dict[str, float]
    batch: PackedBatch
    difference: float | None

    def samples(self) -> list[dict[str, Any]]:
        """Return a row for each sequence, those with the largest share of the loss first.

        Returns:
            Rows with `row` (place in the batch), `group`, `sample`, `part` (number of the sequence in its episode),
            `reward`, `tokens` (in the sequence), `trained` (tokens in the loss), `versions` (the lowest and the highest
            that sampled a token), `finish_reason`, `advantage` (the mean over trained tokens), `ratio` (geometric mean
            over trained tokens of the probability now to that when the token was sampled), `loss` (what the sequence
            adds to the loss of the step) and `share` (its absolute value to the sum of all). Values that the algorithm
            does not compute are None. If a batch is trained on in several epochs, they are those of the last one.
        """
        batch, mask = self.batch, self.batch["loss_mask"]

        def total(values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(batch)).index_add(0, batch.tokens.row_index, torch.where(mask, values, 0.0))

        trained = total(torch.ones(batch.token_count))

        columns: dict[str, torch.Tensor] = {}
        if "advantages" in batch:
            columns["advantage"] = total(batch["advantages"]) / trained
        if "logprobs" in batch and "behavior_logprobs" in batch:
            columns["ratio"] = (total(batch["logprobs"] - batch["behavior_logprobs"]) / trained).exp()
        if "loss" in batch and "loss_weights" in batch:
            columns["loss"] = total(batch["loss"] * batch["loss_weights"])
            columns["share"] = columns["loss"].abs() / columns["loss"].abs().nansum()
        rows = []
        sizes = batch.lengths.tolist()
        versions, masks = torch.split(batch["versions"], sizes), torch.split(mask, sizes)
        for index in range(len(batch)):
            used = versions[index][masks[index] & (versions[index] >= 0)]
            rows.append(
                {
                    "row": index,
                    "group": int(batch["group_id"][index]),
                    "sample": int(batch["sample_index"][index]),
                    "part": int(batch["part_index"][index]),
                    "reward": float(batch["reward"][index]),
                    "tokens": int(batch.lengths[index]),
                    "trained": int(trained[index]),
                    "versions": [int(used.min()), int(used.max())] if len(used) else None,
                    "finish_reason": FinishReason(int(batch["finish_reason"][index])).name.lower(),
                    **{
                        name: _finite(columns[name][index]) if name in columns else None
                        for name in ("advantage", "ratio", "loss", "share")
                    },
                }
            )
        return sorted(rows, key=lambda row: -(row["share"] or 0.0))


def replay(
    run_dir: Path, step: int, changes: Sequence[str] = (), on_step: Callable[[int], None] = lambda _: None
) -> tuple[Replay, Resolved]:
    """Compute a step of a run again.

    Args:
        run_dir: folder of a run that learns from rollouts and is not in progress.
        step: the step, from 1.
        changes: `section.key=value`, to see what another setting would have made of the step and of those before it.
        on_step: called with each step that has been computed.

    Returns:
        The step, and the config with which it was computed.

    Raises:
        UsageError: the run has no such step, or learns from a data set.
        RunError: the trajectories or the checkpoint that the step needs are gone.
    """
    run = RunFolder(run_dir)
    KeptSources.use(run.sources)
    resolved = load_run(run.path, [*_one_rank(run.path), *changes])
    if resolved.config.algorithm.build().encode is not None:
        raise UsageError("the run learns from a data set, and only steps on rollouts can be replayed")
    consumption = _consumption(run)
    begin, checkpoint, digest = _beginning(consumption, step)
    with only_rank(resolved.config):
        learner = _learner(resolved, run)
        state = TrainerState() if checkpoint is None else restore_checkpoint(checkpoint, learner.changing, digest)
        for number in range(begin, step):
            learner.logged_groups = len(consumption.steps[number]) if number == step - 1 else 0
            metrics = _train(resolved, run, learner, state, consumption, number)
            on_step(number + 1)
        if learner.logged is None:
            raise RunError(f"step {step} has no trajectories: all of its groups were without data")
        difference = None
        if not changes and (after := next((one for one in consumption.checkpoints if one[0] == step), None)):
            computed = _parameters(learner.policy)
            restore_checkpoint(after[1], learner.changing, after[2])
            of_run = _parameters(learner.policy)
            largest = [(computed[name] - value).abs().max() for name, value in of_run.items()]
            difference = float(torch.stack(largest).max())  # unlike Python's max, it keeps a NaN
        learner.close()
        return Replay(step, begin, metrics, learner.logged, difference), resolved


def _one_rank(run_dir: Path) -> list[str]:
    """Return the changes of a run's config without which one process could not train."""
    config = load_run(run_dir).config
    changes = []
    for key, engine in [("train_engine", config.train_engine), *((f"roles.{n}", e) for n, e in config.roles.items())]:
        parallel = getattr(engine.settings, "parallel", None)
        for name, value in DIMENSIONS.items():
            if getattr(parallel, name, value) != value:
                changes.append(f"{key}.parallel.{name}={'null' if value is None else value}")
    if config.trainer_processes > 1:
        changes += ["placement.layout=null", "placement.training=null", "placement.generation=null"]
        changes.append("launcher.trainer_processes=1")
    return changes


def _consumption(run: RunFolder) -> Consumption:
    ledgers = [attempt.ledger for attempt in run.attempts() if (attempt.ledger / DATABASE).is_file()]
    if not ledgers:
        raise UsageError(f"{run.path} has no ledger: the run has not begun")
    return read_consumption(ledgers[-1], run.path)


def _beginning(consumption: Consumption, step: int) -> tuple[int, Path | None, str]:
    """Return the steps, the folder and the digest of the checkpoint to begin with.

    Raises:
        UsageError: there is no such step.
        RunError: trajectories that are needed are gone.
    """
    if step - 1 not in consumption.steps:
        steps = max(consumption.steps, default=-1) + 1
        raise UsageError(f"there is no step {step}: the run has steps 1 to {steps}")
    beginnings = [(0, None, ""), *((steps, folder, digest) for steps, folder, digest in consumption.checkpoints)]
    begin, checkpoint, digest = [one for one in beginnings if one[0] < step][-1]
    if any(number in consumption.gone for number in range(begin, step)):
        possible = [
            f"{steps + 1} to {max(consumption.steps) + 1}"
            for steps, *_ in beginnings
            if not consumption.gone.intersection(range(steps, max(consumption.steps) + 1))
        ]
        raise RunError(
            f"step {step} cannot be computed again: trajectories since step {begin + 1} are gone",
            hints=[
                f"these steps can: {possible[0]}" if possible else "no step can",
                "checkpoint.keep_trajectories: true keeps those of all steps",
            ],
        )
    return begin, checkpoint, digest


def _learner(resolved: Resolved, run: RunFolder) -> Learner:
    config = resolved.config
    roles = roles_of(config.algorithm, config.training.updates)
    engines = build_engines(resolved, model_reference(resolved, run), roles, config.sampling.temperature)
    return Learner(config, config.algorithm.build(), roles, engines)


def _train(
    resolved: Resolved, run: RunFolder, learner: Learner, state: TrainerState, consumption: Consumption, number: int
) -> dict[str, float]:
    """Train on the batch of a step, counted from 0, and return its metrics."""
    records = tuple((group, record) for group, record in consumption.steps[number] if record is not None)
    synced = {0: 0, **consumption.synced}
    frame = bytes(encode_frame(Manifest(number, records, synced, {})))
    batch = read_batch(run.path, resolved.config.rollout, frame)
    if batch is None or batch.batch is None:
        return {}
    # While only a critic learns, the same weights count as synced again: version 0 has the last of these steps.
    version = max((version for version, trained in synced.items() if trained <= number), default=0)
    return {**batch.metrics, **learner.learn(batch.batch, number, version, state.algorithm)}


def _parameters(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu().clone() for name, value in engine.named_full_parameters()}


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
