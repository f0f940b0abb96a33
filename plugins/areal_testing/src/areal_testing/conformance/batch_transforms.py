"""What batch transforms and auxiliary losses must do. Functions of a batch and of what the trainer offers."""

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
from areal_testing.conformance.batches import VALUES_SAY, make_batch, outputs_of, with_passes
from areal_testing.conformance.comparisons import same, same_gradients, same_sums
from areal_testing.conformance.components import ComponentSuite
from areal_testing.conformance.training_session import numbers_of
from areal_testing.fakes import FakeContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.data import PackedBatch

SEED = 5
"""Of the order in which sequences stand in the second of two batches."""


class _ContextSuite(ComponentSuite):
    """What both have: a batch with the columns that an algorithm would have computed, and a context."""

    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """The batch of every test, with the columns that the component needs; override this to add other keys."""
        batch = make_batch()
        draw = torch.Generator().manual_seed(7)
        mask = batch["loss_mask"].float()
        columns = {
            "advantages": torch.randn(batch.token_count, generator=draw),
            "returns": batch[VALUES_SAY] + torch.randn(batch.token_count, generator=draw),
            "loss_weights": mask / mask.sum(),
        }
        return with_passes(batch.with_tokens(**columns), self.needs())

    def context(self, state: dict[str, torch.Tensor] | None = None) -> FakeContext:
        """What the trainer would offer."""
        return FakeContext(outputs_of, step=1000, version=4, state={} if state is None else state)

    def spoiled(self, batch: PackedBatch) -> PackedBatch:
        """The batch with other numbers at every token out of the loss; their weight stays 0."""
        noise = 20 * torch.randn(batch.token_count, generator=torch.Generator().manual_seed(3))
        spoiled = {
            name: torch.where(batch["loss_mask"], values, noise)
            for name, values in batch.tokens.values.items()
            if values.is_floating_point() and name != "loss_weights"
        }
        return batch.with_tokens(**spoiled)


class BatchTransformSuite(_ContextSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "batch_transforms"

    def columns(self, batch: PackedBatch, context: FakeContext | None = None) -> Mapping[str, torch.Tensor]:
        """What a new transform computes."""
        found: Mapping[str, torch.Tensor] = self.make()(batch, context or self.context())
        return found

    def test_columns_of_the_batch(self) -> None:
        """One number for each token, sequence or unit: finite, without gradients, and no float64."""
        batch = self.make_batch()
        for name, values in self.columns(batch).items():
            levels = {batch.token_count, len(batch), batch.unit_count}
            assert len(values) in levels, f"column '{name}' has {len(values)} values, and the batch {sorted(levels)}"
            assert not values.requires_grad, f"column '{name}' carries gradients into every micro-batch"
            assert values.dtype != torch.float64, f"column '{name}' has the dtype {values.dtype}"
            finite = not values.is_floating_point() or bool(values.isfinite().all())
            assert finite, f"column '{name}' is not finite"

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """Nothing depends on where a sequence stands."""
        batch = self.make_batch()
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(SEED))
        moved = batch.select(order)
        wanted, found = self.columns(batch), self.columns(moved)
        for name, values in wanted.items():
            there = moved["place"] if len(values) == batch.token_count else order
            same(found[name], values[there], self.tolerance, f"'{name}': the order of sequences matters")

    def test_ids_are_only_names(self) -> None:
        """Other ids for the same groups and episodes change nothing."""
        batch = self.make_batch()
        names = {key: 77 - 5 * torch.unique(batch[key], return_inverse=True)[1] for key in ("group_id", "episode_id")}
        found = self.columns(batch.with_sequences(**names))
        for name, values in self.columns(batch).items():
            same(found[name], values, self.tolerance, f"'{name}': the numbers of groups or episodes matter")

    def test_tokens_out_of_the_loss_mask_do_not_matter(self) -> None:
        """Whatever they hold, the columns of sequences, and of tokens in the loss, stay as they are."""
        batch = self.make_batch()
        found = self.columns(self.spoiled(batch))
        for name, values in self.columns(batch).items():
            inside = batch["loss_mask"] if len(values) == batch.token_count else slice(None)
            message = f"'{name}': tokens out of the mask influence others"
            same(found[name][inside], values[inside], self.tolerance, message)

    def test_the_batch_stays_as_it_was(self) -> None:
        """Nothing is written into the batch's own tensors."""
        batch = self.make_batch()
        before = batch.to_bytes()
        self.columns(batch)
        assert batch.to_bytes() == before, "the transform changed the batch that it was given"

    def test_all_that_it_keeps_is_in_the_state(self) -> None:
        """A run that is stopped after each batch goes on as one that is not: by tensors, saved with a checkpoint."""
        batch = self.make_batch()
        going_on, state, saved = self.make(), self.context(), b""
        for number in range(3):
            wanted = going_on(batch, state)
            resumed = self.context(load(saved) if saved else {})
            found = self.columns(batch, resumed)
            for name, values in wanted.items():
                same(found[name], values, 0.0, f"'{name}': after {number} resumes it is another one")
            odd = {name: type(value) for name, value in resumed.state.items() if not isinstance(value, torch.Tensor)}
            assert not odd, f"the state holds no tensors, which no checkpoint can keep: {odd}"
            assert all("/" in name for name in resumed.state), f"names without a '/' in {sorted(resumed.state)}"
            saved = save(resumed.state)

    def test_what_it_logs(self) -> None:
        """Metrics, and each a finite number."""
        context = self.context()
        self.columns(self.make_batch(), context)
        for name, metric in context.metrics.items():
            assert isinstance(metric, Metric), f"'{name}' is logged as {metric!r:.40}, which is no Metric"
        _finite(numbers_of(context.metrics))


class AuxiliaryLossSuite(_ContextSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        roles: of which one learns.
        learns_in_mask: whether only tokens of `loss_mask` are learned from.
        uses_loss_weights: whether a token counts by its weight in `loss_weights`, as the config says; an
            auxiliary loss with denominators of its own sets False.
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "auxiliary_losses"
    roles: Sequence[str] = (ACTOR.name, CRITIC.name)
    learns_in_mask = True
    uses_loss_weights = True

    def work(self, minibatch: PackedBatch) -> LossSpec:
        """What an update of this minibatch learns."""
        found: LossSpec = self.make()(minibatch, self.context())
        return found

    def test_what_it_says_of_itself(self) -> None:
        """A `LossSpec` of a role, with outputs that engines have, and metrics that are finite numbers."""
        work = self.work(self.make_batch())
        assert isinstance(work, LossSpec), f"it returned {work!r:.60}, which is no LossSpec"
        assert work.role in self.roles, f"no such role: {work.role!r}"
        assert work.outputs, "it asks for no outputs"
        assert all(map(OUTPUTS.fullmatch, work.outputs)), f"outputs that no engine has: {work.outputs}"
        _finite(gradients_of([work])[1])

    def test_any_split_gives_the_same(self) -> None:
        """Loss, gradient and metrics add up to the same over any micro-batches."""
        check_splits([self.work(self.make_batch())], self.tolerance)

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """Nothing depends on where a sequence stands."""
        batch = self.make_batch()
        wanted, sums = gradients_of([self.work(batch)])
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(SEED))
        found, other = gradients_of([self.work(batch.select(order))])
        same_gradients(found, wanted, self.tolerance, "the order of sequences matters")
        same_sums(other, sums, "the order of sequences matters")

    def test_tokens_out_of_the_loss_mask_are_not_learned_from(self) -> None:
        """They have no gradient, and what they hold does not matter."""
        if not self.learns_in_mask:
            return
        batch = self.make_batch()
        wanted, sums = gradients_of([self.work(batch)])
        for name, value in wanted.items():
            outside = value[batch["place"]][~batch["loss_mask"]]
            assert float(outside.abs().max()) == 0, f"{name}: tokens out of the mask are learned"
        found, other = gradients_of([self.work(self.spoiled(batch))])
        same_gradients(found, wanted, self.tolerance, "tokens out of the mask influence others")
        same_sums(other, sums, "tokens out of the mask influence others")

    def test_tokens_count_by_their_weights(self) -> None:
        """Twice the weights make twice the gradient: what the config says of loss aggregation holds here too."""
        if not self.uses_loss_weights:
            return
        batch = self.make_batch()
        wanted, _ = gradients_of([self.work(batch)])
        found, _ = gradients_of([self.work(batch.with_tokens(loss_weights=2 * batch["loss_weights"]))])
        twice = {name: 2 * value for name, value in wanted.items()}
        same_gradients(found, twice, self.tolerance, "the tokens' weights do not count")

    def test_the_minibatch_stays_as_it_was(self) -> None:
        """Nothing is written into its own tensors, neither by the auxiliary loss nor by its loss."""
        batch = self.make_batch()
        before = batch.to_bytes()
        gradients_of([self.work(batch)])
        assert batch.to_bytes() == before, "the auxiliary loss changed the minibatch that it was given"


def _finite(numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        assert bool(torch.tensor(number).isfinite()), f"'{name}' is logged as {number}"
