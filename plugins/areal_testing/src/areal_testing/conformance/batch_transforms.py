"""Conformance suites of batch transforms and auxiliary losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import load, save

from areal_core.data import Metric
from areal_core.sdk import ACTOR, CRITIC, LossSpec
from areal_testing.conformance.algorithms import (
    OUTPUTS,
    check_splits,
    gradients_of,
)
from areal_testing.conformance.batches import VALUES_OUTPUT, make_batch, outputs_of, with_passes
from areal_testing.conformance.comparisons import same, same_gradients, same_sums
from areal_testing.conformance.components import ComponentSuite
from areal_testing.conformance.training_session import numbers_of
from areal_testing.fakes import FakeContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data import PackedBatch

SEED = 5
"""Seed of the random order of sequences in the second of two batches."""


class _ContextSuite(ComponentSuite):
    """The base of both suites: a batch with the columns that an algorithm computes, and a context."""

    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """Return the batch of every test, with the columns that the component needs. Override it to add other keys."""
        batch = make_batch()
        draw = torch.Generator().manual_seed(7)
        mask = batch["loss_mask"].float()
        columns = {
            "advantages": torch.randn(batch.token_count, generator=draw),
            "returns": batch[VALUES_OUTPUT] + torch.randn(batch.token_count, generator=draw),
            "loss_weights": mask / mask.sum(),
        }
        return with_passes(batch.with_tokens(**columns), self.needs())

    def context(self, state: dict[str, torch.Tensor] | None = None) -> FakeContext:
        """Return the trainer's services with fake outputs and this algorithm state."""
        return FakeContext(outputs_of, step=1000, version=4, state={} if state is None else state)

    def spoiled(self, batch: PackedBatch) -> PackedBatch:
        """Return the batch with random values at every token outside the loss mask, except their weights of 0."""
        generator = torch.Generator().manual_seed(3)
        spoiled = {}
        for name, values in batch.tokens.values.items():
            if values.is_floating_point() and name != "loss_weights":
                mask = batch["loss_mask"].view(-1, *(1 for _ in values.shape[1:]))
                spoiled[name] = torch.where(mask, values, 20 * torch.randn(values.shape, generator=generator))
        return batch.with_tokens(**spoiled)


class BatchTransformSuite(_ContextSuite):
    """Tests of a batch transform. Set `component` (and `settings`), or override `make`.

    Attributes:
        tolerance: largest absolute difference in every comparison.
    """

    kind: ClassVar[str] = "batch_transforms"

    def columns(self, batch: PackedBatch, context: FakeContext | None = None) -> Mapping[str, torch.Tensor]:
        """Return the columns that a new transform computes for a batch."""
        columns: Mapping[str, torch.Tensor] = self.make()(batch, context or self.context())
        return columns

    def test_columns_of_the_batch(self) -> None:
        """A column has one number for each token, sequence or sequence group: finite, no gradients, no float64."""
        batch = self.make_batch()
        for name, values in self.columns(batch).items():
            levels = {batch.token_count, len(batch), batch.unit_count}
            assert len(values) in levels, f"column '{name}' has {len(values)} values, and the batch {sorted(levels)}"
            assert not values.requires_grad, f"column '{name}' carries gradients into every micro-batch"
            assert values.dtype != torch.float64, f"column '{name}' has the dtype {values.dtype}"
            finite = not values.is_floating_point() or bool(values.isfinite().all())
            assert finite, f"column '{name}' is not finite"

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """The columns do not depend on the order of the sequences."""
        batch = self.make_batch()
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(SEED))
        moved = batch.select(order)
        expected, actual = self.columns(batch), self.columns(moved)
        for name, values in expected.items():
            there = moved["place"] if len(values) == batch.token_count else order
            same(actual[name], values[there], self.tolerance, f"'{name}': the order of sequences matters")

    def test_ids_are_only_names(self) -> None:
        """The columns stay the same if groups and episodes get other ids."""
        batch = self.make_batch()
        names = {key: 77 - 5 * torch.unique(batch[key], return_inverse=True)[1] for key in ("group_id", "episode_id")}
        actual = self.columns(batch.with_sequences(**names))
        for name, values in self.columns(batch).items():
            same(actual[name], values, self.tolerance, f"'{name}': the numbers of groups or episodes matter")

    def test_tokens_out_of_the_loss_mask_do_not_matter(self) -> None:
        """Values outside the loss mask do not affect the columns of sequences and of tokens in the mask."""
        batch = self.make_batch()
        actual = self.columns(self.spoiled(batch))
        for name, values in self.columns(batch).items():
            inside = batch["loss_mask"] if len(values) == batch.token_count else slice(None)
            message = f"'{name}': tokens out of the mask influence others"
            same(actual[name][inside], values[inside], self.tolerance, message)

    def test_the_batch_stays_as_it_was(self) -> None:
        """The transform does not write into the batch's tensors."""
        batch = self.make_batch()
        before = batch.to_bytes()
        self.columns(batch)
        assert batch.to_bytes() == before, "the transform changed the batch in place"

    def test_its_state_survives_a_resume(self) -> None:
        """A run that is resumed after each batch computes the same columns: all state is tensors in the checkpoint."""
        batch = self.make_batch()
        uninterrupted, context, checkpoint = self.make(), self.context(), b""
        for number in range(3):
            expected = uninterrupted(batch, context)
            resumed = self.context(load(checkpoint) if checkpoint else {})
            actual = self.columns(batch, resumed)
            for name, values in expected.items():
                same(actual[name], values, 0.0, f"'{name}' differs after {number} resumes")
            odd = {name: type(value) for name, value in resumed.state.items() if not isinstance(value, torch.Tensor)}
            assert not odd, f"a checkpoint stores only tensors, but the state has: {odd}"
            assert all("/" in name for name in resumed.state), f"names without a '/' in {sorted(resumed.state)}"
            checkpoint = save(resumed.state)

    def test_metrics_are_finite(self) -> None:
        """The transform logs a `Metric` with a finite number for each name."""
        context = self.context()
        self.columns(self.make_batch(), context)
        for name, metric in context.metrics.items():
            assert isinstance(metric, Metric), f"'{name}' is logged as {metric!r:.40}, which is not a Metric"
        _assert_finite(numbers_of(context.metrics))


class AuxiliaryLossSuite(_ContextSuite):
    """Tests of an auxiliary loss. Set `component` (and `settings`), or override `make`.

    Attributes:
        roles: names of the roles that the loss may train.
        learns_in_mask: True if only tokens of `loss_mask` affect the loss.
        uses_loss_weights: True if a token counts by its weight in `loss_weights`, as the config's loss aggregation
            demands. Set False if the auxiliary loss computes its own denominators.
        tolerance: largest absolute difference in every comparison.
    """

    kind: ClassVar[str] = "auxiliary_losses"
    roles: Sequence[str] = (ACTOR.name, CRITIC.name)
    learns_in_mask = True
    uses_loss_weights = True

    def work(self, minibatch: PackedBatch) -> LossSpec:
        """Return the loss spec of an update on this minibatch."""
        loss_spec: LossSpec = self.make()(minibatch, self.context())
        return loss_spec

    def test_declarations_are_valid(self) -> None:
        """The loss is a `LossSpec` of a known role, with outputs that engines have and metrics that are finite."""
        loss_spec = self.work(self.make_batch())
        assert isinstance(loss_spec, LossSpec), f"it returned {loss_spec!r:.60}, which is not a LossSpec"
        assert loss_spec.role in self.roles, f"no such role: {loss_spec.role!r}"
        assert loss_spec.outputs, "it asks for no outputs"
        assert all(map(OUTPUTS.fullmatch, loss_spec.outputs)), f"outputs that no engine has: {loss_spec.outputs}"
        _assert_finite(gradients_of([loss_spec])[1])

    def test_any_split_gives_the_same(self) -> None:
        """Loss, gradients and metrics are the same for any micro-batches."""
        check_splits([self.work(self.make_batch())], self.tolerance)

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """The gradients do not depend on the order of the sequences."""
        batch = self.make_batch()
        expected, expected_numbers = gradients_of([self.work(batch)])
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(SEED))
        actual, numbers = gradients_of([self.work(batch.select(order))])
        same_gradients(actual, expected, self.tolerance, "the order of sequences matters")
        same_sums(numbers, expected_numbers, "the order of sequences matters")

    def test_tokens_out_of_the_loss_mask_are_not_learned_from(self) -> None:
        """Tokens outside the loss mask have no gradient, and their values do not matter."""
        if not self.learns_in_mask:
            return
        batch = self.make_batch()
        expected, expected_numbers = gradients_of([self.work(batch)])
        for name, value in expected.items():
            outside = value[batch["place"]][~batch["loss_mask"]]
            assert float(outside.abs().max()) == 0, f"{name}: tokens out of the mask have a gradient"
        actual, numbers = gradients_of([self.work(self.spoiled(batch))])
        same_gradients(actual, expected, self.tolerance, "tokens out of the mask influence others")
        same_sums(numbers, expected_numbers, "tokens out of the mask influence others")

    def test_tokens_count_by_their_weights(self) -> None:
        """Doubled weights double the gradient, so that the config's loss aggregation applies here too."""
        if not self.uses_loss_weights:
            return
        batch = self.make_batch()
        expected, _ = gradients_of([self.work(batch)])
        actual, _ = gradients_of([self.work(batch.with_tokens(loss_weights=2 * batch["loss_weights"]))])
        doubled = {name: 2 * value for name, value in expected.items()}
        same_gradients(actual, doubled, self.tolerance, "the gradient does not follow the tokens' weights")

    def test_the_minibatch_stays_as_it_was(self) -> None:
        """Neither the auxiliary loss nor its loss function writes into the minibatch's tensors."""
        batch = self.make_batch()
        before = batch.to_bytes()
        gradients_of([self.work(batch)])
        assert batch.to_bytes() == before, "the auxiliary loss changed the minibatch in place"


def _assert_finite(numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        assert bool(torch.tensor(number).isfinite()), f"'{name}' is logged as {number}"
