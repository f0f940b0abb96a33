"""Policy gradients composed of an advantage, a filter, a correction, a loss and an aggregation.

The order of things for one batch: `prepare` computes advantages on the whole batch and, when several updates follow,
freezes the proximal policy; `weigh` fixes every token's weight in the update's loss; `loss` is called for each
micro-batch and only adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.algorithms.aggregation import with_weights
from areal_core.data.metrics import Metric
from areal_core.interfaces.algorithm import LossResult, PolicyTerms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.algorithms.settings import PolicyGradientSettings
    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.algorithm import Forward


class PolicyGradient:
    """An `Algorithm` from five components; see `PolicyGradientSettings` for what each is."""

    needs_rollouts = True
    outputs = ("logprobs", "entropy")

    def __init__(self, settings: PolicyGradientSettings) -> None:
        self._advantage = settings.advantage.build()
        self._correction = settings.correction.build() if settings.correction else None
        self._policy_loss = settings.policy_loss.build()
        self._aggregation = settings.aggregation.build()
        self._kl = settings.reference_kl
        self._entropy_coefficient = settings.entropy_coefficient
        self.filter = settings.filter.build() if settings.filter else None
        self.needs_reference = settings.reference_kl.coefficient > 0

    def prepare(self, batch: PackedBatch, forward: Mapping[str, Forward], updates: int) -> PackedBatch:
        """See `Algorithm.prepare`. With a single update the proximal policy is the current one: no extra pass."""
        advantages = self._advantage(batch)
        if len(advantages) == len(batch):
            advantages = advantages[batch.tokens.row_index]
        batch = batch.with_tokens(advantages=advantages.float())
        if updates > 1:
            batch = batch.with_tokens(proximal_logprobs=forward["actor"](batch, ["logprobs"])["logprobs"])
        if self.needs_reference:
            batch = batch.with_tokens(reference_logprobs=forward["reference"](batch, ["logprobs"])["logprobs"])
        return batch

    def weigh(self, minibatch: PackedBatch) -> PackedBatch:
        """See `Algorithm.weigh`."""
        return with_weights(minibatch, self._aggregation)

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """See `Algorithm.loss`: Σ w_t (c_t L_t + β KL_t - η H_t), with w from `weigh` and c from the correction."""
        terms = self._terms(batch, outputs)
        losses, logged = self._policy_loss(terms)
        if self._correction is not None:
            weights, corrected = self._correction(terms)
            losses, logged = losses * weights, logged | corrected
        if terms.reference_logprobs is not None:
            difference = torch.where(terms.mask, terms.logprobs - terms.reference_logprobs, 0.0)
            divergence = reference_kl(difference, self._kl.estimator)
            losses = losses + self._kl.coefficient * divergence
            logged["reference_kl"] = divergence
        if self._entropy_coefficient and terms.entropy is not None:
            losses = losses - self._entropy_coefficient * terms.entropy
        # Where the mask is off a value may be anything, infinite included: select, do not multiply.
        losses = torch.where(terms.mask, losses, 0.0)
        logged |= _mismatch(terms)
        metrics = {name: Metric.mean(value, terms.mask) for name, value in logged.items()}
        return LossResult((losses * batch["loss_weights"]).sum(), metrics)

    @staticmethod
    def _terms(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> PolicyTerms:
        logprobs = outputs["logprobs"]
        return PolicyTerms(
            logprobs=logprobs,
            proximal_logprobs=batch["proximal_logprobs"] if "proximal_logprobs" in batch else logprobs.detach(),
            behaviour_logprobs=batch["logprobs"],
            advantages=batch["advantages"],
            mask=batch["loss_mask"],
            row_index=batch.tokens.row_index,
            rows=len(batch),
            entropy=outputs.get("entropy"),
            reference_logprobs=batch.get("reference_logprobs"),
        )


LARGEST_LOG_RATIO = 20.0
"""Beyond it the exponential of a log-ratio says nothing but that the two policies have nothing in common."""


def reference_kl(difference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(policy ‖ reference) from one sample (Schulman, "Approximating KL divergence", 2020), [T].

    With d = log policy - log reference: k2 = d² / 2, k3 = exp(-d) - 1 + d; d is cut at ±20 in the exponential. As
    values both estimate KL(policy ‖ reference); the expected gradient of k2 is that of the same divergence, the one of
    k3 that of KL(reference ‖ policy).
    """
    if estimator == "k2":
        return difference.square() / 2
    return torch.exp(-difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) - 1 + difference


def _mismatch(terms: PolicyTerms) -> dict[str, torch.Tensor]:
    """How far the sampling policy is from the one that learns, and from what the trainer computes for it."""
    difference = terms.behaviour_logprobs - terms.proximal_logprobs
    logged = {
        "behaviour_kl": reference_kl(difference, "k3"),  # of KL(behaviour ‖ proximal)
        "behaviour_difference": difference.abs(),
        "logprob": terms.logprobs,
    }
    if terms.entropy is not None:
        logged["entropy"] = terms.entropy
    return logged
