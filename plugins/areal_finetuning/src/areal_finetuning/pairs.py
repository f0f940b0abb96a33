"""Pairs of a chosen and a rejected sequence. Each pair is a unit of a batch, so that splits keep it together.

The column `is_chosen` [B] bool says which is which; their order does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


def weigh_pairs(minibatch: PackedBatch) -> PackedBatch:
    """Add `pair_weights` [U] float32, 1 / U for the U pairs of an update. They add up over any split of it.

    Raises:
        ValueError: a unit is not a pair.
    """
    pairs = minibatch.unit_count
    index = minibatch.unit_index
    is_chosen = minibatch.get("is_chosen")
    if index is None or is_chosen is None:
        raise ValueError(
            "preferences need an example tokenizer that returns two sequences a row, with the column is_chosen"
        )
    sides = index.new_zeros(pairs, 2).index_put((index, is_chosen.long()), index.new_ones(()), accumulate=True)
    if not bool((sides == 1).all()):
        unit = int((sides != 1).any(1).nonzero()[0])
        rejected, chosen = sides[unit].tolist()
        raise ValueError(f"a preference is one chosen and one rejected sequence; this unit has {chosen} and {rejected}")
    return minibatch.with_units(index, **{**minibatch.units, "pair_weights": torch.full((pairs,), 1 / pairs)})


def refuse_pairs(batch: PackedBatch) -> None:
    """Refuse a batch of preferences for an algorithm that trains on single sequences.

    Raises:
        ValueError: the batch has the column `is_chosen`.
    """
    if "is_chosen" in batch:
        raise ValueError(
            "these sequences are pairs of a chosen and a rejected one, so the rejected would be learned too: choose an "
            "example tokenizer of one sequence a row, such as finetuning/conversations"
        )


def sides_of(batch: PackedBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values [B] of the chosen and of the rejected sequence of each pair, both [U], with gradients."""
    index, is_chosen = batch.unit_index, batch["is_chosen"]
    assert index is not None
    empty = values.new_zeros(len(batch["pair_weights"]))
    chosen = empty.index_add(0, index, torch.where(is_chosen, values, 0.0))
    return chosen, empty.index_add(0, index, torch.where(is_chosen, 0.0, values))


def pair_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, Metric]:
    """Return the means over pairs of the rewards [U] each. A tie counts as half right."""
    margin = (chosen - rejected).detach()
    right = (margin > 0).double() + (margin == 0).double() / 2
    return {
        "accuracy": Metric.mean(right),
        "margin": Metric.mean(margin),
        "chosen_reward": Metric.mean(chosen),
        "rejected_reward": Metric.mean(rejected),
    }
