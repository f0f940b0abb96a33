"""Preference optimization: train a policy on pairs of answers, without a reward model or sampling."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from areal_core.config import needs_of
from areal_core.data import Metric
from areal_core.sdk import ACTOR, LossResult, LossSpec, run_passes
from areal_finetuning.pairs import pair_metrics, sides_of, weigh_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.sdk import Context
    from areal_finetuning.config import DPOSettings, ORPOSettings, PairSettings, SimPOSettings


class _OfPairs(ABC):
    """An `Algorithm` that trains on pairs; its subclasses define the loss."""

    group_filters = ()

    def __init__(self, settings: PairSettings) -> None:
        self.encode = settings.example_tokenizer.build()
        self._pair_settings = settings

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Run the reference's forward pass if there is a reference; see `Algorithm.prepare`."""
        return run_passes(batch, needs_of(self._pair_settings, context.updates), context)

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield one update for each minibatch; see `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            yield [LossSpec(ACTOR.name, weigh_pairs(minibatch), ("logprobs",), self.loss)]

    @abstractmethod
    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs."""


class Preferences(_OfPairs):
    """An `Algorithm` that makes chosen answers more likely than rejected ones; see `DPOSettings` and `IPOSettings`."""

    def __init__(self, settings: DPOSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs."""
        settings = self._settings
        logprobs = outputs["logprobs"]
        reference = torch.zeros_like(logprobs) if settings.reference_free else batch["reference_logprobs"]
        # Subtract before summing: single log-probabilities are close, their sums large, so rounding would matter.
        reduce = _row_means if settings.length_normalized else row_sums
        log_ratios = reduce(batch, logprobs - reference)
        chosen, rejected = sides_of(batch, log_ratios)
        losses = preference_losses(
            chosen - rejected,
            loss=settings.loss,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )
        metrics = _metrics(batch, logprobs, settings.beta * chosen, settings.beta * rejected)
        return LossResult((losses * batch["pair_weights"]).sum(), metrics)


class SimPO(_OfPairs):
    """An `Algorithm` that compares mean log-probabilities, without a reference; see `SimPOSettings`."""

    def __init__(self, settings: SimPOSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs."""
        beta, logprobs = self._settings.beta, outputs["logprobs"]
        chosen, rejected = sides_of(batch, _row_means(batch, logprobs))
        losses = simpo_losses(chosen, rejected, beta=beta, gamma=self._settings.gamma)
        metrics = _metrics(batch, logprobs, beta * chosen, beta * rejected)
        return LossResult((losses * batch["pair_weights"]).sum(), metrics)


class ORPO(_OfPairs):
    """An `Algorithm` that fine-tunes on chosen answers and lowers the odds of rejected ones; see `ORPOSettings`."""

    def __init__(self, settings: ORPOSettings) -> None:
        super().__init__(settings)
        self._settings = settings

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs."""
        weight, logprobs = self._settings.weight, outputs["logprobs"]
        chosen, rejected = sides_of(batch, _row_means(batch, logprobs))
        losses = weight * odds_ratio_losses(chosen, rejected) - chosen
        metrics = {
            **_metrics(batch, logprobs, weight * chosen, weight * rejected),
            "negative_log_likelihood": Metric.mean(-chosen),
            "log_odds_ratio": Metric.mean((log_odds(chosen) - log_odds(rejected)).detach()),
        }
        return LossResult((losses * batch["pair_weights"]).sum(), metrics)


def preference_losses(log_ratios: torch.Tensor, *, loss: str, beta: float, label_smoothing: float) -> torch.Tensor:
    """Return the loss of each pair.

    With h = log π(y_c) / π_ref(y_c) - log π(y_r) / π_ref(y_r):

    - sigmoid: -(1 - ε) log σ(β h) - ε log σ(-β h). With ε = 0 it is DPO (arXiv 2305.18290, equation 7); ε is the
      share of labels that are assumed to be swapped (Mitchell, "A note on DPO with noisy preferences & relationship to
      IPO", 2023).
    - ipo: (h - 1 / (2β))² (arXiv 2310.12036, equation 17, where β is called τ).

    Args:
        log_ratios: [U], h of each pair.
        loss: `sigmoid` or `ipo`.
        beta, label_smoothing: β and ε.

    Returns:
        [U] in the dtype of `log_ratios`, with gradients.
    """
    if loss == "ipo":
        return (log_ratios - 1 / (2 * beta)).square()
    right, wrong = F.logsigmoid(beta * log_ratios), F.logsigmoid(-beta * log_ratios)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def simpo_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float) -> torch.Tensor:
    """Return -log σ(β (l_c - l_r) - γ) of each pair, l being the mean log-probability of an answer's tokens (SimPO,
    arXiv 2405.14734, equation 6).

    γ is the margin of the rewards β l, as in the paper and as TRL's `simpo_gamma`. TRL's CPO trainer computes the same
    with `loss_type="simpo", cpo_alpha=0`.

    Args:
        chosen, rejected: [U] float, l_c and l_r of each pair, in nats per token.
        beta, gamma: β and γ.

    Returns:
        [U] in the dtype of `chosen`, with gradients.

    Example:
        >>> import torch
        >>> simpo_losses(torch.tensor([-0.5]), torch.tensor([-1.0]), beta=2.0, gamma=1.0)  # log 2: at the margin
        tensor([0.6931])
    """
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def odds_ratio_losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return -log σ(log odds_c - log odds_r) of each pair, odds = p / (1 - p) (ORPO, arXiv 2403.07691, equation 7).

    p = exp(l) is the geometric mean of the probabilities of an answer's tokens, as in the paper and in TRL.

    Args:
        chosen, rejected: [U] float, l of the chosen and of the rejected answer, in nats per token.

    Returns:
        [U] in the dtype of `chosen`, with gradients.

    Example:
        >>> import torch
        >>> odds_ratio_losses(torch.tensor([0.75]).log(), torch.tensor([0.5]).log())  # odds of 3 and 1: log 4/3
        tensor([0.2877])
    """
    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)) of probabilities p = exp(logprobs), at most 20: the odds of p = 1 are infinite.

    Example:
        >>> import torch
        >>> log_odds(torch.tensor([0.75, 0.5]).log()), log_odds(torch.tensor([0.0]))
        (tensor([1.0986, 0.0000]), tensor([20.]))
    """
    bounded = logprobs.clamp(max=-math.exp(-20.0))
    return bounded - (-torch.expm1(bounded)).log()


def _metrics(
    batch: PackedBatch, logprobs: torch.Tensor, chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor
) -> dict[str, Metric]:
    """Return means over pairs: of the rewards [U], and of the log-probabilities of whole answers."""
    chosen, rejected = sides_of(batch, row_sums(batch, logprobs.detach()))
    return {
        **pair_metrics(chosen_rewards, rejected_rewards),
        "chosen_logprob": Metric.mean(chosen),
        "rejected_logprob": Metric.mean(rejected),
    }


def _row_means(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the means of a flat tensor over the tokens of each sequence that are in the loss, [B]; 0 without any."""
    return row_sums(batch, values) / row_sums(batch, torch.ones_like(values)).clamp(min=1)


def row_sums(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the sums of a flat tensor over the tokens of each sequence that are in the loss, [B]."""
    inside = torch.where(batch["loss_mask"], values, 0.0)
    return values.new_zeros(len(batch)).index_add(0, batch.tokens.row_index, inside)
