"""Supervised fine-tuning: the negative log-likelihood of what a data set's rows say."""

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
    """An `Algorithm` that learns what the data set says: L = -Σ w_t log π(y_t)."""

    group_filters = ()
    outputs: tuple[str, ...] = ("logprobs",)
    """What `loss` reads; a subclass with another loss of tokens has its own."""

    def __init__(self, settings: SupervisedSettings | GKDSettings) -> None:
        self.encode = None if settings.example_tokenizer is None else settings.example_tokenizer.build()
        self._loss_aggregation = settings.loss_aggregation.build()

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Nothing to prepare; see `Algorithm.prepare`."""
        refuse_pairs(batch)
        return batch

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """See `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            weighed = minibatch.with_tokens(loss_weights=self._loss_aggregation(minibatch))
            yield [LossSpec(ACTOR.name, weighed, self.outputs, self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """The summed loss of a micro-batch."""
        losses = -torch.where(batch["loss_mask"], outputs["logprobs"], 0.0)
        mean = Metric.mean(losses, batch["loss_mask"])
        return LossResult((losses * batch["loss_weights"]).sum(), {"negative_log_likelihood": mean})
