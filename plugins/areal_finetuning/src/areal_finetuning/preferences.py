"""Direct preference optimization: train a policy on pairs of answers, without a reward model or sampling."""

from __future__ import annotations

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
    from areal_finetuning.config import DPOSettings


class Preferences:
    """An `Algorithm` that makes chosen answers more likely than rejected ones; see `DPOSettings` and `IPOSettings`."""

    group_filters = ()

    def __init__(self, settings: DPOSettings) -> None:
        self.encode = settings.example_tokenizer.build()
        self._settings = settings

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Run the reference's forward pass; see `Algorithm.prepare`."""
        return run_passes(batch, needs_of(self._settings, context.updates), context)

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield one update for each minibatch; see `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            yield [LossSpec(ACTOR.name, weigh_pairs(minibatch), ("logprobs",), self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its pairs."""
        settings = self._settings
        logprobs = outputs["logprobs"]
        reference = torch.zeros_like(logprobs) if settings.reference_free else batch["reference_logprobs"]
        # Subtract before summing: single log-probabilities are close, their sums large, so rounding would matter.
        log_ratios = _row_sums(batch, logprobs - reference)
        if settings.length_normalized:
            log_ratios = log_ratios / _row_sums(batch, torch.ones_like(logprobs)).clamp(min=1)
        chosen, rejected = sides_of(batch, log_ratios)
        losses = preference_losses(
            chosen - rejected,
            loss=settings.loss,
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )
        of_chosen, of_rejected = sides_of(batch, _row_sums(batch, logprobs.detach()))
        metrics = {
            **pair_metrics(settings.beta * chosen, settings.beta * rejected),
            "chosen_logprob": Metric.mean(of_chosen),
            "rejected_logprob": Metric.mean(of_rejected),
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


def _row_sums(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the sums of a flat tensor over the tokens of each sequence that are in the loss, [B]."""
    inside = torch.where(batch["loss_mask"], values, 0.0)
    return values.new_zeros(len(batch)).index_add(0, batch.tokens.row_index, inside)
