"""Kahneman-Tversky optimization: train a policy on single answers, each of which is labeled as good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric, PackedBatch, Ragged, shift_to_predictions
from areal_core.sdk import ACTOR, REFERENCE, LossResult, LossSpec
from areal_finetuning.pairs import refuse_pairs
from areal_finetuning.preferences import row_sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.sdk import Context
    from areal_finetuning.config import KTOSettings


class KTO:
    """An `Algorithm` that makes desirable answers more likely and undesirable ones less likely; see `KTOSettings`."""

    group_filters = ()

    def __init__(self, settings: KTOSettings) -> None:
        self.encode = settings.example_tokenizer.build()
        self._settings = settings

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """Run the reference's forward pass; see `Algorithm.prepare`.

        Raises:
            ValueError: the sequences have no labels, or are pairs.
        """
        refuse_pairs(batch)
        if "is_desirable" not in batch:
            raise ValueError(
                "KTO needs an example tokenizer that labels each sequence, with the column is_desirable, such as "
                "finetuning/labeled"
            )
        return batch.with_tokens(reference_logprobs=context.forward(REFERENCE.name, batch, ["logprobs"])["logprobs"])

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """Yield one update for each minibatch, with the KL of its mismatched sequences; see `Algorithm.updates`."""
        for minibatch in context.minibatches(batch):
            count, mismatched = len(minibatch), mismatch(minibatch)
            policy, reference = (
                context.forward(role.name, mismatched, ["logprobs"])["logprobs"] for role in (ACTOR, REFERENCE)
            )
            kl = row_sums(mismatched, policy - reference).mean().clamp(min=0)
            context.log("kl", Metric.mean(kl))
            shares = kl.new_full((count,), 1 / count)
            work = minibatch.with_sequences(kl=kl.expand(count).clone(), sequence_weights=shares)
            yield [LossSpec(ACTOR.name, work, ("logprobs",), self.loss)]

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Return the summed loss of a micro-batch, and means over its desirable and its undesirable sequences."""
        settings, is_desirable = self._settings, batch["is_desirable"]
        log_ratios = row_sums(batch, outputs["logprobs"] - batch["reference_logprobs"])
        losses = kto_losses(
            log_ratios,
            batch["kl"].to(log_ratios.dtype),
            is_desirable,
            beta=settings.beta,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
        )
        rewards = settings.beta * log_ratios.detach()
        metrics = {
            "desirable_reward": Metric.mean(rewards, is_desirable),
            "undesirable_reward": Metric.mean(rewards, ~is_desirable),
        }
        return LossResult((losses * batch["sequence_weights"]).sum(), metrics)


def kto_losses(
    log_ratios: torch.Tensor,
    kl: torch.Tensor,
    is_desirable: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
    """Return λ (1 - σ(± β (r - z))) of each sequence, + for desirable ones (KTO, arXiv 2402.01306, equation 7).

    TRL's KTO trainer computes the same with `loss_type="kto"`.

    Args:
        log_ratios: [B] float, r = log π(y) / π_ref(y).
        kl: [] or [B] float, z, without a gradient.
        is_desirable: [B] bool.
        beta, desirable_weight, undesirable_weight: β, and λ of desirable and of undesirable sequences.

    Returns:
        [B] in the dtype of `log_ratios`, with gradients.

    Example:
        >>> import torch
        >>> ratios, good = torch.tensor([0.0, 0.0]), torch.tensor([True, False])
        >>> kto_losses(ratios, torch.tensor(0.0), good, beta=0.1, desirable_weight=1.0, undesirable_weight=2.0)
        tensor([0.5000, 1.0000])
    """
    is_good = is_desirable.to(log_ratios.dtype)
    weight = desirable_weight * is_good + undesirable_weight * (1 - is_good)
    return weight * torch.sigmoid((1 - 2 * is_good) * beta * (log_ratios - kl))


def mismatch(batch: PackedBatch) -> PackedBatch:
    """Return the sequences with each other's answers: the prompt of a sequence, and the answer of the one before it.

    The order is that of `group_id`, the rows' number, so that it does not depend on how a batch was put together. The
    answer of a sequence begins with the first token that is learned. Results are cut to the length of the batch's
    longest sequence, which is known to fit the model.

    Args:
        batch: at least two sequences with `group_id`, shifted to predictions.

    Returns:
        A shifted batch with `input_ids`, `loss_mask` and `targets`.

    Raises:
        ValueError: the batch has one sequence, whose answer would be its own.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged, shift_to_predictions
        >>> ids, mask = torch.tensor([1, 2, 3, 7, 8]), torch.tensor([False, True, True, False, True])
        >>> tokens = Ragged(torch.tensor([3, 2]), {"input_ids": ids, "loss_mask": mask})
        >>> batch = PackedBatch(tokens, {"group_id": torch.tensor([4, 5])})
        >>> mismatch(shift_to_predictions(batch))["input_ids"].tolist()  # 1 with the answer 8, 7 with the answer 2, 3
        [1, 8, 7, 2, 3]
    """
    if len(batch) < 2:
        raise ValueError(
            "KTO estimates the KL with the answers of other rows, but this update has one row: set rollout.batch_size "
            "to at least 2, and training.num_minibatches so that each has two rows"
        )
    lengths = batch.lengths.tolist()
    ids, masks = torch.split(batch["input_ids"], lengths), torch.split(batch["loss_mask"], lengths)
    # In a shifted batch position t is about token t + 1, so the mask of a token is one place further left.
    starts = [int(mask.int().argmax()) + 1 for mask in masks]
    longest, sequences, learned = max(lengths), [], []
    order = batch["group_id"].argsort(stable=True).tolist()
    for row, before in zip(order, [order[-1], *order[:-1]], strict=True):
        start, first = starts[row], starts[before]
        sequences.append(torch.cat((ids[row][:start], ids[before][first:]))[:longest])
        learned.append(torch.cat((torch.zeros_like(masks[row][:start]), masks[before][first - 1 : -1]))[:longest])
    columns = {"input_ids": torch.cat(sequences), "loss_mask": torch.cat(learned)}
    return shift_to_predictions(PackedBatch(Ragged(batch.lengths.new_tensor([*map(len, sequences)]), columns)))
