"""Supervised fine-tuning: the negative log-likelihood of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.algorithms.aggregation import with_weights
from areal_core.data.metrics import Metric
from areal_core.interfaces.algorithm import LossResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.algorithms.settings import SupervisedSettings
    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.algorithm import Forward


class Supervised:
    """An `Algorithm` that learns what the data set's completions say: L = -Σ w_t log π(y_t)."""

    needs_rollouts = False
    needs_reference = False
    outputs = ("logprobs",)
    filter = None

    def __init__(self, settings: SupervisedSettings) -> None:
        self._aggregation = settings.aggregation.build()

    def prepare(self, batch: PackedBatch, forward: Mapping[str, Forward], updates: int) -> PackedBatch:
        """Nothing to prepare."""
        return batch

    def weigh(self, minibatch: PackedBatch) -> PackedBatch:
        """See `Algorithm.weigh`."""
        return with_weights(minibatch, self._aggregation)

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """See `Algorithm.loss`."""
        losses = -torch.where(batch["loss_mask"], outputs["logprobs"], 0.0)
        mean = Metric.mean(losses, batch["loss_mask"])
        return LossResult((losses * batch["loss_weights"]).sum(), {"negative_log_likelihood": mean})
