"""Computes an algorithm with components of the user's own on a made-up batch, in the preflight child.

Components of plugins have tests of their own: an algorithm without the user's own components is not computed.
"""

from __future__ import annotations

import math
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from areal_core.checks.findings import reported
from areal_core.checks.rewards import TRIAL_S
from areal_core.config import selections
from areal_core.config.problems import dotted
from areal_core.data import FinishReason, PackedBatch, Trajectory, shift_to_predictions
from areal_core.data.trajectory import Generation
from areal_core.errors import RunError, line_of
from areal_core.training.context import BatchContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import RunConfig
    from areal_core.interfaces.algorithm import Algorithm

_OF_ROLLOUTS: Final = re.compile(r"[^']*'(reward\.|turn_rewards'|routed_experts')")
"""Matches a `KeyError` for a field that rewards, workflows or engines add, which the made-up batch lacks."""


def try_algorithm(config: RunConfig, problems: list[str], notes: list[str]) -> None:
    """Compute the algorithm's losses and gradients on a batch of the run's size.

    Args:
        config: of the run.
        problems: gets what the algorithm raises, or that a loss or gradient is not finite.
        notes: gets why the algorithm could not be tried to its end: the made-up batch lacks what it reads.
    """
    chosen = selections(config.algorithm, ("algorithm",))
    own = ", ".join(f"{dotted(path)} ({part.target})" for path, part in chosen if part.record is None)
    algorithm = None
    with reported("algorithm", problems):
        algorithm = config.algorithm.build() if own else None
    if algorithm is None or algorithm.encode is not None:
        return
    if not dist.is_initialized():  # as on the trainer's only rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sys.stderr.write(f"trying {own} on a made-up batch\n")
    signal.alarm(TRIAL_S)
    try:
        _compute_losses(algorithm, config)
    except _UnknownOutputError as error:
        notes.append(f"{own}: was not tried to its end, because the made-up models have no output {error}")
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        reason = error.message if isinstance(error, RunError) else f"{type(error).__name__}: {error}{line_of(error)}"
        if isinstance(error, KeyError):
            reason += "; outputs of models are in the batch only if `needs` declares them"
        if isinstance(error, KeyError) and _may_come_with_rollouts(str(error), config):
            notes.append(f"{own}: was not tried to its end on a made-up batch: {reason}")
        else:
            problems.append(f"on a made-up batch: {reason}; check {own}")
    finally:
        signal.alarm(0)


def _may_come_with_rollouts(error: str, config: RunConfig) -> bool:
    """Return whether a run's rollouts may have a field that the made-up batch lacks.

    Workflows of plugins and components of the user's own may add any field.
    """
    has_own = any(
        chosen.record is None
        for _, chosen in (*selections(config.inference_engine), *selections(config.algorithm))
        if chosen.kind in {"inference_engines", "reward_shaping", "group_filters"}
    )
    has_workflow_of_core = config.workflow is not None and config.workflow.target.startswith("core/")
    return has_own or not has_workflow_of_core or _OF_ROLLOUTS.match(error) is not None


def _compute_losses(algorithm: Algorithm, config: RunConfig) -> None:
    rollout, tops = config.rollout, config.sampling.top_logprobs
    batch = _made_up_batch(rollout.batch_size, rollout.group_size, tops)
    if not algorithm.group_filters:
        batch["reward"][-config.rollout.group_size :] = 0.5  # equal rewards reveal a division by a group's deviation
    context = BatchContext(config.training, _MadeUpModels(), config.seed, config.steps, version=1)
    for losses in algorithm.updates(algorithm.prepare(batch, context), context):
        for spec in losses:
            outputs = context.forward(spec.role, spec.batch, spec.outputs)
            loss = spec.loss(spec.batch, {name: output.requires_grad_() for name, output in outputs.items()}).loss
            if not bool(loss.isfinite()):
                raise RunError(f"the loss of {spec.role} is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
            for name, output in outputs.items():
                if output.grad is not None and not bool(output.grad.isfinite().all()):
                    raise RunError(
                        f"the loss of {spec.role} is {loss.item():g}, and its gradient for {name} is not finite"
                    )


class _MadeUpModels(dict[str, Any]):
    """Engines of all roles. Their log-probabilities are close to those of the sampling policy."""

    def __missing__(self, role: str) -> _MadeUpModels:
        return self

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `TrainEngine.forward`.

        Raises:
            _UnknownOutputError: an output has more than one number for each token.
        """
        logprobs = batch["logprobs"] - 0.1 * torch.rand(batch.token_count, generator=torch.Generator().manual_seed(1))
        known = {"logprobs": logprobs, "entropy": -logprobs, "values": -logprobs, "divergence": -logprobs}
        known["sum_pi_squared"] = logprobs.exp()
        if "top_logprobs" in batch:
            known["top_logprobs"] = batch["top_logprobs"] - 0.1
        if unknown := [name for name in outputs if name.partition(":")[0] not in known]:
            raise _UnknownOutputError(", ".join(unknown))
        return {name: known[name.partition(":")[0]].clone() for name in outputs}


class _UnknownOutputError(Exception):
    """The made-up models have no such output."""


def _made_up_batch(groups: int, group_size: int, tops: int) -> PackedBatch:
    """Return a batch as the trainer passes it to an algorithm, with so many likeliest tokens for each token."""
    number, zero = torch.arange(groups * group_size), torch.zeros(groups * group_size, dtype=torch.int64)
    answers = [range(1 + row * 7 % 9) for row in number.tolist()]
    top_ids, top_logprobs = [*range(tops)], [-0.5 - math.log(max(1, tops))] * tops
    generations = []
    for answer_ids in answers:
        count = len(answer_ids)
        generations.append(
            Generation(
                answer_ids,
                [-0.5] * count,
                [0] * count,
                FinishReason.STOP,
                top_ids=[top_ids] * count,
                top_logprobs=[top_logprobs] * count,
            )
        )
    batch = PackedBatch.from_trajectories([Trajectory.from_generation([1, 2, 3], answer) for answer in generations])
    group = number // group_size
    ids = {"group_id": group, "episode_id": number, "sample_index": number % group_size, "part_index": zero}
    ids |= {"agent_id": zero, "prompt_id": torch.stack([group, zero], 1)}
    return shift_to_predictions(batch.with_sequences(reward=(number * 7 % 11).float() / 10, **ids))
