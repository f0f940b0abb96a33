"""Conformance suite of loss aggregations: the weight of every token in the loss of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from areal_testing.conformance.batches import make_batch, with_passes
from areal_testing.conformance.comparisons import same
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


class LossAggregationSuite(ComponentSuite):
    """Tests of a loss aggregation. Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "loss_aggregations"
    tolerance = 1e-6

    def make_batch(self) -> PackedBatch:
        """Return the minibatch of every test, with the columns that it needs. Override it to add other keys."""
        return with_passes(make_batch(), self.needs())

    def test_one_weight_for_each_token_of_the_loss(self) -> None:
        """Weights are [T] float32, finite, without gradients, above 0 in the loss mask and 0 outside of it."""
        batch = self.make_batch()
        weights = self.make()(batch)
        assert weights.shape == (batch.token_count,), f"shape {tuple(weights.shape)}"
        assert weights.dtype == torch.float32, f"dtype {weights.dtype}"
        assert not weights.requires_grad, "weights carry gradients"
        assert bool(weights.isfinite().all()), "a weight is not finite"
        assert float(weights[~batch["loss_mask"]].abs().sum()) == 0, "a token outside the mask has a weight"
        assert float(weights[batch["loss_mask"]].min()) > 0, "a token of the loss has no weight"

    def test_weights_do_not_depend_on_values(self) -> None:
        """Weights depend on masks, lengths and ids, but not on tokens, log-probabilities or rewards."""
        batch = self.make_batch()
        expected = self.make()(batch)
        other = batch.with_tokens(logprobs=-3 * batch["logprobs"], input_ids=batch["input_ids"].flip(0))
        actual = self.make()(other.with_sequences(reward=-5 * batch["reward"] + 1))
        same(actual, expected, 0.0, "weights depend on tokens, log-probabilities or rewards")

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        """A token has the same weight in any order of the sequences."""
        batch = self.make_batch()
        expected = self.make()(batch)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
        moved = batch.select(order)
        same(self.make()(moved), expected[moved["place"]], self.tolerance, "the order of sequences matters")

    def test_weights_are_those_of_a_mean(self) -> None:
        """The weights of a batch that is repeated twice add up to the same as those of the batch."""
        batch = self.make_batch()
        weights, repeated = self.make()(batch), self.make()(type(batch).concatenate([batch, _renamed(batch)]))
        total, repeated_total = float(weights.sum()), float(repeated.sum())
        assert abs(repeated_total - total) <= self.tolerance * max(1.0, total), (
            f"weights add up to {total:.6f}, and to {repeated_total:.6f} if the batch is repeated: a sum, no mean"
        )

    def test_an_empty_loss_mask_has_weights_of_0(self) -> None:
        """A minibatch without a token in the loss mask has weights of 0: there is no division by 0."""
        batch = self.make_batch()
        weights = self.make()(batch.with_tokens(loss_mask=torch.zeros_like(batch["loss_mask"])))
        assert bool((weights == 0).all()), "a weight is not 0, though no token is in the loss"


def _renamed(batch: PackedBatch) -> PackedBatch:
    """Return the same sequences as other episodes of other groups."""
    return batch.with_sequences(group_id=batch["group_id"] + 10**7, episode_id=batch["episode_id"] + 10**7)
