"""What loss aggregations must do: the weight of every token in the loss of an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from areal_testing.conformance.batches import make_batch, with_passes
from areal_testing.conformance.comparisons import same
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


class LossAggregationSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "loss_aggregations"
    tolerance = 1e-6

    def make_batch(self) -> PackedBatch:
        """The minibatch of every test, with the columns that it needs; override this to add other keys."""
        return with_passes(make_batch(), self.needs())

    def test_one_weight_for_each_token_of_the_loss(self) -> None:
        """[T] float32, finite, without gradients, above 0 in the mask and 0 outside of it."""
        batch = self.make_batch()
        weights = self.make()(batch)
        assert weights.shape == (batch.token_count,), f"shape {tuple(weights.shape)}"
        assert weights.dtype == torch.float32, f"dtype {weights.dtype}"
        assert not weights.requires_grad, "weights carry gradients"
        assert bool(weights.isfinite().all()), "a weight is not finite"
        assert float(weights[~batch["loss_mask"]].abs().sum()) == 0, "a token out of the mask has a weight"
        assert float(weights[batch["loss_mask"]].min()) > 0, "a token of the loss has no weight"

    def test_only_the_shape_of_a_batch_counts(self) -> None:
        """Where tokens are and whose they are; not what the policies say of them, nor what they have earned."""
        batch = self.make_batch()
        wanted = self.make()(batch)
        other = batch.with_tokens(logprobs=-3 * batch["logprobs"], input_ids=batch["input_ids"].flip(0))
        found = self.make()(other.with_sequences(reward=-5 * batch["reward"] + 1))
        same(found, wanted, 0.0, "weights depend on what tokens are")

    def test_the_order_of_sequences_does_not_matter(self) -> None:
        """Every token has the same weight wherever its sequence stands."""
        batch = self.make_batch()
        wanted = self.make()(batch)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
        moved = batch.select(order)
        same(self.make()(moved), wanted[moved["place"]], self.tolerance, "the order of sequences matters")

    def test_a_mean_of_equal_losses_is_not_larger_than_one_of_them(self) -> None:
        """Weights add up to 1 at most where every token counts as a share of a mean; twice the data weighs no more."""
        batch = self.make_batch()
        once, twice = self.make()(batch), self.make()(type(batch).concatenate([batch, _renamed(batch)]))
        total, doubled = float(once.sum()), float(twice.sum())
        assert abs(doubled - total) <= self.tolerance * max(1.0, total), (
            f"weights of a batch add up to {total:.6f}, of the same twice to {doubled:.6f}: a sum, no mean"
        )

    def test_a_batch_without_a_token_in_the_loss(self) -> None:
        """Has weights of 0, and no division by 0."""
        batch = self.make_batch()
        weights = self.make()(batch.with_tokens(loss_mask=torch.zeros_like(batch["loss_mask"])))
        assert bool((weights == 0).all()), "weights where no token is in the loss"


def _renamed(batch: PackedBatch) -> PackedBatch:
    """The same sequences as other episodes of other groups."""
    return batch.with_sequences(group_id=batch["group_id"] + 10**7, episode_id=batch["episode_id"] + 10**7)
