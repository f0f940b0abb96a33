"""Direct preference optimization (arXiv 2305.18290): a policy learns from pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import FinishReason, Generation, Metric, Trajectory
from areal_core.sdk import ACTOR, LossResult, LossSpec, run_passes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context
    from areal_homemade.config import DPOSettings


class DPO:
    """Rows have `prompt`, `chosen` and `rejected`; the two answers are one unit, the chosen one first."""

    group_filters = ()

    def __init__(self, settings: DPOSettings) -> None:
        self._settings = settings

    def encode(self, row: Mapping[str, Any], tokenizer: Any) -> list[Trajectory]:
        """Two sequences; the answers are learned from."""
        prompt, *answers = (
            tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "chosen", "rejected")
        )
        ended = [[*answer, tokenizer.eos_token_id] for answer in answers]
        said = [Generation(ids, [0.0] * len(ids), [-1] * len(ids), FinishReason.STOP) for ids in ended]
        return [Trajectory.from_generation(prompt, generation) for generation in said]

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """What the reference says of every token."""
        return run_passes(batch, self._settings.needs(context.updates), context)

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Every pair counts the same."""
        for minibatch in context.minibatches(batch):
            share = torch.full((len(minibatch),), 1 / minibatch.unit_count)
            yield [LossSpec(ACTOR.name, minibatch.with_sequences(share=share), ("logprobs",), self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """-log σ(β h), h the log-ratio to the reference of the chosen answer less that of the rejected one."""
        each = torch.where(batch["loss_mask"], outputs["logprobs"] - batch["reference_logprobs"], 0.0)
        rewards = self._settings.beta * each.new_zeros(len(batch)).index_add(0, batch.tokens.row_index, each)
        chosen, rejected = torch.tensor(batch.unit_rows, device=each.device).T
        margins = rewards[chosen] - rewards[rejected]
        losses = -torch.nn.functional.logsigmoid(margins)
        metrics = {"margin": Metric.mean(margins), "accuracy": Metric.mean((margins > 0).float())}
        return LossResult((losses * batch["share"][chosen]).sum(), metrics)
