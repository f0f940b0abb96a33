"""Supervised fine-tuning: the negative log-likelihood of the answers in a data set's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_finetuning.pairs import refuse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context
    from areal_finetuning.config import GKDSettings, SupervisedSettings


class Supervised:
    """An `Algorithm` that trains on the rows of a data set: L = -Σ_t w_t log π(y_t)."""

    group_filters = ()
    outputs: tuple[str, ...] = ("logprobs",)
    """Model outputs that `loss` reads. A subclass with another loss overrides it."""

    def __init__(self, settings: SupervisedSettings | GKDSettings) -> None:
        self.encode = None if settings.example_tokenizer is None else settings.example_tokenizer.build()
        self._loss_aggregation = settings.loss_aggregation.build()

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Check that the batch has no preferences, and return it; see `Algorithm.prepare`."""
        refuse_pairs(batch)
        return batch

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield one update for each minibatch; see `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            weighted = minibatch.with_tokens(loss_weights=self._loss_aggregation(minibatch))
            yield [LossSpec(ACTOR.name, weighted, self.outputs, self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch."""
        losses = -torch.where(batch["loss_mask"], outputs["logprobs"], 0.0)
        mean = Metric.mean(losses, batch["loss_mask"])
        return LossResult((losses * batch["loss_weights"]).sum(), {"negative_log_likelihood": mean})
