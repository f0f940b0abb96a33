"""Reward model: one score for a whole sequence, trained on pairs of a better and a worse one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from areal_core.sdk import LossResult, LossSpec
from areal_finetuning.config import REWARD_MODEL
from areal_finetuning.pairs import pair_metrics, sides_of, weigh_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context
    from areal_finetuning.config import RewardModelSettings


class RewardModel:
    """An `Algorithm` that scores chosen sequences above rejected ones; see `RewardModelSettings`."""

    group_filters = ()

    def __init__(self, settings: RewardModelSettings) -> None:
        self.encode = settings.example_tokenizer.build()
        self._centering = settings.centering

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Return the batch; nothing has to be prepared."""
        return batch

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield one update for each minibatch; see `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            yield [LossSpec(REWARD_MODEL.name, weigh_pairs(minibatch), ("values",), self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs.

        The score of a sequence is the value at its last token, which depends on all tokens.
        """
        chosen, rejected = sides_of(batch, outputs["values"][batch.tokens.offsets[1:] - 1])
        margins = batch.get("margin")
        margin = torch.zeros_like(chosen) if margins is None else sides_of(batch, margins)[0]
        losses = reward_losses(chosen, rejected, margin, centering=self._centering)
        return LossResult((losses * batch["pair_weights"]).sum(), pair_metrics(chosen, rejected))


def reward_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, *, centering: float
) -> torch.Tensor:
    """Return -log σ(s_c - s_r - m) + c (s_c + s_r)²; see `RewardModelSettings` for the papers.

    Args:
        chosen, rejected: [U], scores of each pair.
        margin: [U], amount by which the chosen score should be larger.
        centering: c.

    Returns:
        [U] in the dtype of the scores, with gradients.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
