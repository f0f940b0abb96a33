"""A reward model: one score for a whole sequence, learned from pairs of which one is the better."""

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
        """Nothing to prepare."""
        return batch

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """See `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            yield [LossSpec(REWARD_MODEL.name, weigh_pairs(minibatch), ("values",), self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """The summed loss of a micro-batch, and means over its pairs.

        The value at a position is of all tokens up to it, so that the last one of a sequence has seen the whole.
        """
        chosen, rejected = sides_of(batch, outputs["values"][batch.tokens.offsets[1:] - 1])
        margins = batch.get("margin")
        margin = torch.zeros_like(chosen) if margins is None else sides_of(batch, margins)[0]
        losses = reward_losses(chosen, rejected, margin, centering=self._centering)
        return LossResult((losses * batch["pair_weights"]).sum(), pair_metrics(chosen, rejected))


def reward_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, *, centering: float
) -> torch.Tensor:
    """-log σ(s_c - s_r - m) + c (s_c + s_r)²; see `RewardModelSettings` for the papers.

    Args:
        chosen, rejected: [U], the scores of each pair.
        margin: [U], by how much the chosen one is to be better.
        centering: c.

    Returns:
        [U] in the dtype of the scores, with gradients.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
