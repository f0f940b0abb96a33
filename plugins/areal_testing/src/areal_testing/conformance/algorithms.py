"""What an algorithm must do between the batch and the loss."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import torch

from areal_core.data import Metric, combine
from areal_testing.conformance.batches import (
    ACTOR_SAYS,
    REFERENCE_SAYS,
    made_up,
    make_batch,
    outputs_of,
)
from areal_testing.conformance.comparisons import same, same_gradients, same_sums
from areal_testing.conformance.components import ComponentSuite
from areal_testing.conformance.training_session import numbers_of
from areal_testing.fakes import FakeContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import PackedBatch
    from areal_core.sdk import Algorithm, LossSpec

OUTPUTS = re.compile(r"logprobs|entropy|values|hidden|divergence:[\w-]+:\d[\d.e-]*")
"""What engines compute, and this suite makes up."""


class AlgorithmSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        is_policy_gradient: whether the gradient on policy, summed over a sequence, is that of REINFORCE under the
            columns `advantages` and `loss_weights`; an algorithm with terms of its own, such as a penalty, and one that
            has no such columns set False.
        learns_in_mask: whether only tokens of `loss_mask` are learned from; a reward model, whose score stands at the
            end of a sequence, sets False.
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "algorithms"
    is_policy_gradient = True
    learns_in_mask = True
    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """The batch of every test; override this to add keys that the algorithm reads, or units."""
        return make_batch()

    def context(self, updates: int = 2, step: int = 1000) -> FakeContext:
        """What the trainer would offer; each of the updates is on the whole batch."""
        return FakeContext(outputs_of, updates, step=step, version=4)

    def works(self, algorithm: Algorithm, batch: PackedBatch, updates: int = 2) -> Sequence[LossSpec]:
        """The work of the first update."""
        context = self.context(updates)
        return next(iter(algorithm.updates(algorithm.prepare(batch, context), context)))

    def test_what_it_says_of_itself(self) -> None:
        """The attributes that the trainer reads, and outputs that engines have."""
        algorithm = self.make()
        assert algorithm.encode is None or callable(algorithm.encode)
        assert all(callable(one) for one in algorithm.group_filters)
        works = self.works(algorithm, self.make_batch())
        assert works, "an update has no work"
        unknown = {name for work in works for name in work.outputs if not OUTPUTS.fullmatch(name)}
        assert not unknown, f"outputs that no engine has: {unknown}"

    def test_prepare_adds_numbers(self) -> None:
        """Every column that it adds is finite, without gradients, and the sequences stay those that were given."""
        algorithm, batch = self.make(), self.make_batch()
        prepared = algorithm.prepare(batch, self.context())
        assert len(prepared) == len(batch), "prepare changed the number of sequences"
        for name in set(prepared.tokens.values) | set(prepared.sequences):
            value = prepared[name]
            assert not value.requires_grad, f"'{name}' carries gradients into every micro-batch"
            if value.is_floating_point() and name not in batch:
                assert bool(value.isfinite().all()), f"'{name}' is not finite"

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """Nothing depends on where a unit stands, and those of one group are known by `group_id`. Within a unit the
        order stays, for it may say which is which: of a preference the chosen answer comes first."""
        algorithm, batch = self.make(), self.make_batch()
        wanted, sums = gradients_of(self.works(algorithm, batch))
        units = torch.randperm(batch.unit_count, generator=torch.Generator().manual_seed(5)).tolist()
        order = [row for unit in units for row in batch.unit_rows[unit]]
        found, other = gradients_of(self.works(algorithm, batch.select(order)))
        same_gradients(found, wanted, self.tolerance, "the order of sequences matters")
        same_sums(other, sums, "the order of sequences matters")

    def test_any_split_gives_the_same(self) -> None:
        """Loss, gradient and metrics add up to the same over any micro-batches, siblings apart included."""
        check_splits(self.works(self.make(), self.make_batch()), self.tolerance)

    def test_tokens_out_of_the_loss_mask_are_not_learned_from(self) -> None:
        """They have no gradient and no weight, and what they hold does not matter."""
        if not self.learns_in_mask:
            return
        algorithm, batch = self.make(), self.make_batch()
        works = self.works(algorithm, batch)
        for work in works:
            if "loss_weights" in work.batch:
                outside = work.batch["loss_weights"][~work.batch["loss_mask"]]
                assert float(outside.abs().sum()) == 0, "a weight out of the mask"
        wanted, _ = gradients_of(works)
        outside = ~batch["loss_mask"]
        for name, value in wanted.items():
            assert float(value[batch["place"]][outside].abs().max()) == 0, f"{name}: tokens out of the mask are learned"
        noise = 20 * torch.randn(batch.token_count, generator=torch.Generator().manual_seed(3))
        keys = ("logprobs", ACTOR_SAYS, REFERENCE_SAYS)
        spoiled = batch.with_tokens(**{key: torch.where(outside, noise, batch[key]) for key in keys})
        found, _ = gradients_of(self.works(algorithm, spoiled))
        same_gradients(found, wanted, self.tolerance, "tokens out of the mask influence others")

    def test_denominators_come_before_masking(self) -> None:
        """Weights count the tokens of `loss_mask`; how far the policies are apart leaves them as they are."""
        algorithm, batch = self.make(), self.make_batch()
        far = batch.with_tokens(logprobs=torch.where(batch.tokens.row_index == 4, -30.0, batch["logprobs"]))
        for near, other in zip(self.works(algorithm, batch), self.works(algorithm, far), strict=True):
            if "loss_weights" in near.batch:
                words = "the weights of tokens depend on the policies"
                same(other.batch["loss_weights"], near.batch["loss_weights"], 0.0, words)

    def test_the_gradient_on_policy_is_the_policy_gradient(self) -> None:
        """-A times the token's weight, summed over each sequence; in particular none flows through the advantage."""
        algorithm, batch = self.make(), self.make_batch()
        if not self.is_policy_gradient or algorithm.encode is not None:
            return
        batch = batch.with_tokens(**dict.fromkeys((ACTOR_SAYS, REFERENCE_SAYS), batch["logprobs"]))
        for updates in (1, 2):
            (work, *_) = self.works(algorithm, batch, updates)
            gradients, _ = gradients_of([work])
            found = gradients[f"0 {work.role} logprobs"]
            index, rows = batch.tokens.row_index, torch.zeros(len(batch))
            weights = -work.batch["advantages"] * work.batch["loss_weights"]
            each = torch.where(batch["loss_mask"], weights, 0.0)
            words = "on policy the gradient is not REINFORCE's"
            same(rows.index_add(0, index, found), rows.index_add(0, index, each), self.tolerance, words)


def gradients_of(
    works: Sequence[LossSpec], split: Sequence[Sequence[int]] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """By work and output the gradient of every token, [T] by place; and all losses and metrics as numbers.

    Args:
        works: of one update.
        split: units of each micro-batch; None is all at once.
    """
    gradients: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}
    for number, work in enumerate(works):
        place, units = work.batch["place"], work.batch.unit_rows
        made = {}
        for name in work.outputs:
            values = made_up(name, work.batch[ACTOR_SAYS], work.batch)
            value = made[name] = values.new_zeros(int(place.max()) + 1, *values.shape[1:])
            value[place] = values
            value.requires_grad_()
        parts: list[dict[str, Metric]] = []
        for members in split or [range(len(units))]:
            part = work.batch.select([row for unit in members for row in units[unit]])
            result = work.loss(part, {name: value[part["place"]] for name, value in made.items()})
            assert result.loss.shape == (), f"the loss has the shape {tuple(result.loss.shape)}"
            result.loss.backward()  # type: ignore[no-untyped-call]
            parts.append({"loss": Metric.sum(result.loss), **result.metrics})
        found = {name: value.grad for name, value in made.items() if value.grad is not None}
        assert found, f"the loss of role '{work.role}' has no gradient"
        gradients |= {f"{number} {work.role} {name}": value for name, value in found.items()}
        numbers |= {f"{number} {work.role} {name}": value for name, value in numbers_of(combine(parts)).items()}
    return gradients, numbers


def check_splits(works: Sequence[LossSpec], tolerance: float) -> None:
    """Loss, gradient and metrics add up to the same over any micro-batches; there is a gradient."""
    wanted, sums = gradients_of(works)
    assert max(float(value.abs().max()) for value in wanted.values()) > 0, "the loss has no gradient anywhere"
    units = list(range(works[0].batch.unit_count))
    shuffled = [units[i] for i in torch.randperm(len(units), generator=torch.Generator().manual_seed(2)).tolist()]
    for split in (
        [units[: len(units) // 2], units[len(units) // 2 :]],
        [shuffled[:2], shuffled[2:5], shuffled[5:]] if len(units) > 5 else [shuffled[:1], shuffled[1:]],
        [[unit] for unit in units],
    ):
        found, other = gradients_of(works, split)
        same_gradients(found, wanted, tolerance, f"split into {len(split)} micro-batches")
        same_sums(other, sums, f"split into {len(split)} micro-batches")
