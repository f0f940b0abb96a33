"""Conformance suite of algorithms: from a batch to losses and their gradients."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import torch

from areal_core.data import Metric, combine
from areal_testing.conformance.batches import (
    ACTOR_OUTPUT,
    REFERENCE_OUTPUT,
    fake_output,
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

OUTPUTS = re.compile(r"logprobs|entropy|values|hidden|top_logprobs|sum_pi_squared|divergence:[\w-]+:\d[\d.e-]*")
"""Outputs that engines compute. `fake_output` computes stand-ins for them."""


class AlgorithmSuite(ComponentSuite):
    """Tests of an algorithm. Set `component` (and `settings`), or override `make`.

    Attributes:
        is_policy_gradient: True if the on-policy gradient, summed over a sequence, is that of REINFORCE with the
            columns `advantages` and `loss_weights`. Set False if the algorithm adds terms such as a penalty, or has no
            such columns.
        learns_in_mask: True if only tokens of `loss_mask` affect the loss. Set False for a reward model, whose score
            belongs to the end of a sequence.
        tolerance: largest absolute difference in every comparison.
    """

    kind: ClassVar[str] = "algorithms"
    is_policy_gradient = True
    learns_in_mask = True
    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """Return the batch of every test. Override it to add keys that the algorithm reads, or sequence groups."""
        return make_batch()

    def context(self, updates: int = 2, step: int = 1000) -> FakeContext:
        """Return the trainer's services with fake outputs. Each of the updates is on the whole batch."""
        return FakeContext(outputs_of, updates, step=step, version=4)

    def works(self, algorithm: Algorithm, batch: PackedBatch, updates: int = 2) -> Sequence[LossSpec]:
        """Return the loss specs of the first update."""
        context = self.context(updates)
        return next(iter(algorithm.updates(algorithm.prepare(batch, context), context)))

    def test_declarations_are_valid(self) -> None:
        """The attributes that the trainer reads are callable, and engines have the outputs that each loss needs."""
        algorithm = self.make()
        assert algorithm.encode is None or callable(algorithm.encode)
        assert all(callable(group_filter) for group_filter in algorithm.group_filters)
        loss_specs = self.works(algorithm, self.make_batch())
        assert loss_specs, "an update has no loss spec"
        unknown = {name for loss_spec in loss_specs for name in loss_spec.outputs if not OUTPUTS.fullmatch(name)}
        assert not unknown, f"outputs that no engine has: {unknown}"

    def test_prepare_adds_numbers(self) -> None:
        """Each column that `prepare` adds is finite and carries no gradients. The number of sequences stays."""
        algorithm, batch = self.make(), self.make_batch()
        prepared = algorithm.prepare(batch, self.context())
        assert len(prepared) == len(batch), "prepare changed the number of sequences"
        for name in set(prepared.tokens.values) | set(prepared.sequences):
            value = prepared[name]
            assert not value.requires_grad, f"'{name}' carries gradients into every micro-batch"
            if value.is_floating_point() and name not in batch:
                assert bool(value.isfinite().all()), f"'{name}' is not finite"

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """The gradients do not depend on the order of sequence groups: `group_id` says which belong together.

        The test keeps the order within a sequence group, which may have a meaning: the chosen answer of a preference
        comes first.
        """
        algorithm, batch = self.make(), self.make_batch()
        expected, expected_numbers = gradients_of(self.works(algorithm, batch))
        units = torch.randperm(batch.unit_count, generator=torch.Generator().manual_seed(5)).tolist()
        order = [row for unit in units for row in batch.unit_rows[unit]]
        actual, numbers = gradients_of(self.works(algorithm, batch.select(order)))
        same_gradients(actual, expected, self.tolerance, "the order of sequences matters")
        same_sums(numbers, expected_numbers, "the order of sequences matters")

    def test_any_split_gives_the_same(self) -> None:
        """Loss, gradients and metrics are the same for any micro-batches, also if they separate episodes of a group."""
        check_splits(self.works(self.make(), self.make_batch()), self.tolerance)

    def test_tokens_out_of_the_loss_mask_are_not_learned_from(self) -> None:
        """Tokens outside the loss mask have no gradient and no weight, and their values do not matter."""
        if not self.learns_in_mask:
            return
        algorithm, batch = self.make(), self.make_batch()
        loss_specs = self.works(algorithm, batch)
        for loss_spec in loss_specs:
            if "loss_weights" in loss_spec.batch:
                outside = loss_spec.batch["loss_weights"][~loss_spec.batch["loss_mask"]]
                assert float(outside.abs().sum()) == 0, "a token outside the mask has a weight"
        expected, _ = gradients_of(loss_specs)
        outside = ~batch["loss_mask"]
        for name, value in expected.items():
            assert float(value[batch["place"]][outside].abs().max()) == 0, (
                f"{name}: tokens out of the mask have a gradient"
            )
        noise = 20 * torch.randn(batch.token_count, generator=torch.Generator().manual_seed(3))
        keys = ("logprobs", ACTOR_OUTPUT, REFERENCE_OUTPUT)
        spoiled = batch.with_tokens(**{key: torch.where(outside, noise, batch[key]) for key in keys})
        actual, _ = gradients_of(self.works(algorithm, spoiled))
        same_gradients(actual, expected, self.tolerance, "tokens out of the mask influence others")

    def test_denominators_come_before_masking(self) -> None:
        """Weights count all tokens of `loss_mask`, also masked ones: they do not depend on the policies' distance."""
        algorithm, batch = self.make(), self.make_batch()
        far = batch.with_tokens(logprobs=torch.where(batch.tokens.row_index == 4, -30.0, batch["logprobs"]))
        for near, other in zip(self.works(algorithm, batch), self.works(algorithm, far), strict=True):
            if "loss_weights" in near.batch:
                message = "the weights of tokens depend on the policies"
                same(other.batch["loss_weights"], near.batch["loss_weights"], 0.0, message)

    def test_the_gradient_on_policy_is_the_policy_gradient(self) -> None:
        """The on-policy gradient, summed over each sequence, is -A times the token weights: none flows through A."""
        algorithm, batch = self.make(), self.make_batch()
        if not self.is_policy_gradient or algorithm.encode is not None:
            return
        batch = batch.with_tokens(**dict.fromkeys((ACTOR_OUTPUT, REFERENCE_OUTPUT), batch["logprobs"]))
        for updates in (1, 2):
            (loss_spec, *_) = self.works(algorithm, batch, updates)
            gradients, _ = gradients_of([loss_spec])
            actual = gradients[f"0 {loss_spec.role} logprobs"]
            index, zeros = batch.tokens.row_index, torch.zeros(len(batch))
            weights = -loss_spec.batch["advantages"] * loss_spec.batch["loss_weights"]
            expected = torch.where(batch["loss_mask"], weights, 0.0)
            message = "on policy the gradient is not REINFORCE's"
            same(zeros.index_add(0, index, actual), zeros.index_add(0, index, expected), self.tolerance, message)


def gradients_of(
    loss_specs: Sequence[LossSpec], split: Sequence[Sequence[int]] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of every token by loss spec and output, [T] in the order of `place`; and losses and metrics.

    Args:
        loss_specs: those of one update.
        split: indices of the sequence groups of each micro-batch; None makes one micro-batch.
    """
    gradients: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}
    for number, loss_spec in enumerate(loss_specs):
        place, units = loss_spec.batch["place"], loss_spec.batch.unit_rows
        outputs = {}
        for name in loss_spec.outputs:
            values = fake_output(name, loss_spec.batch[ACTOR_OUTPUT], loss_spec.batch)
            value = outputs[name] = values.new_zeros(int(place.max()) + 1, *values.shape[1:])
            value[place] = values
            value.requires_grad_()
        parts: list[dict[str, Metric]] = []
        for members in split or [range(len(units))]:
            part = loss_spec.batch.select([row for unit in members for row in units[unit]])
            result = loss_spec.loss(part, {name: value[part["place"]] for name, value in outputs.items()})
            assert result.loss.shape == (), f"the loss has the shape {tuple(result.loss.shape)}"
            result.loss.backward()  # type: ignore[no-untyped-call]
            parts.append({"loss": Metric.sum(result.loss), **result.metrics})
        with_gradient = {name: value.grad for name, value in outputs.items() if value.grad is not None}
        assert with_gradient, f"the loss of role '{loss_spec.role}' has no gradient"
        gradients |= {f"{number} {loss_spec.role} {name}": value for name, value in with_gradient.items()}
        numbers |= {f"{number} {loss_spec.role} {name}": value for name, value in numbers_of(combine(parts)).items()}
    return gradients, numbers


def check_splits(loss_specs: Sequence[LossSpec], tolerance: float) -> None:
    """Assert that loss, gradients and metrics are the same for any micro-batches, and that there is a gradient."""
    expected, expected_numbers = gradients_of(loss_specs)
    assert max(float(value.abs().max()) for value in expected.values()) > 0, "the loss has no gradient anywhere"
    units = list(range(loss_specs[0].batch.unit_count))
    shuffled = [units[i] for i in torch.randperm(len(units), generator=torch.Generator().manual_seed(2)).tolist()]
    for split in (
        [units[: len(units) // 2], units[len(units) // 2 :]],
        [shuffled[:2], shuffled[2:5], shuffled[5:]] if len(units) > 5 else [shuffled[:1], shuffled[1:]],
        [[unit] for unit in units],
    ):
        actual, numbers = gradients_of(loss_specs, split)
        same_gradients(actual, expected, tolerance, f"split into {len(split)} micro-batches")
        same_sums(numbers, expected_numbers, f"split into {len(split)} micro-batches")
