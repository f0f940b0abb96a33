"""What an algorithm must do between the batch and the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from areal_core.data import Metric, combine
from areal_core.testing.conformance.batches import make_batch
from areal_core.testing.conformance.components import ComponentSuite
from areal_core.testing.conformance.training_session import numbers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import PackedBatch
    from areal_core.interfaces import Algorithm

OUTPUTS = {"logprobs", "entropy", "values"}
SPLITS = (
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
    [[11, 3], [0, 7, 5, 1], [2, 4, 6, 8, 9, 10]],
    [[row] for row in range(12)],
)


class AlgorithmSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        is_policy_gradient: whether the gradient on policy, summed over a sequence, is that of REINFORCE under the
            token weights of `weigh`; an algorithm with terms of its own, such as a penalty, sets False.
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "algorithms"
    is_policy_gradient = True
    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """The batch of every test; override this to add keys that the algorithm reads."""
        return make_batch()

    def prepared(self, algorithm: Algorithm, batch: PackedBatch, updates: int = 2) -> PackedBatch:
        """The batch after `prepare`, with models that say of each token what the batch itself holds of it."""

        def answer(key: str) -> Any:
            def forward(asked: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
                known = {"logprobs": asked[key], "values": asked["values"], "entropy": asked[key].abs()}
                return {name: known[name] for name in outputs}

            return forward

        models = {"actor": answer("actor_logprobs"), "critic": answer("actor_logprobs")}
        models["reference"] = answer("reference_logprobs_made")
        return algorithm.prepare(batch, models, updates)

    def gradient(
        self, algorithm: Algorithm, weighed: PackedBatch, split: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The gradient for every output of every token, [outputs, T] by place, and loss and metrics as numbers."""
        size = int(weighed["place"].max()) + 1
        made = torch.zeros(len(algorithm.outputs), size)
        for row, name in zip(made, algorithm.outputs, strict=True):
            given = {"logprobs": weighed["actor_logprobs"], "values": weighed["values"]}
            row[weighed["place"]] = given.get(name, weighed["actor_logprobs"].abs())
        made.requires_grad_()
        parts: list[dict[str, Metric]] = []
        for rows in split:
            part = weighed.select(rows)
            outputs = {name: row[part["place"]] for name, row in zip(algorithm.outputs, made, strict=True)}
            result = algorithm.loss(part, outputs)
            assert result.loss.shape == (), f"the loss has the shape {tuple(result.loss.shape)}"
            result.loss.backward()  # type: ignore[no-untyped-call]
            parts.append({"loss": Metric.sum(result.loss), **result.metrics})
        assert made.grad is not None, "the loss has no gradient"
        return made.grad, numbers_of(combine(parts))

    def test_what_it_says_of_itself(self) -> None:
        """The attributes that the trainer reads."""
        algorithm = self.make()
        assert isinstance(algorithm.needs_rollouts, bool)
        assert isinstance(algorithm.needs_reference, bool)
        assert algorithm.filter is None or callable(algorithm.filter)
        assert set(algorithm.outputs) <= OUTPUTS, f"outputs that no engine has: {set(algorithm.outputs) - OUTPUTS}"

    def test_prepare_adds_what_the_loss_needs(self) -> None:
        """`advantages` for each token, and the proximal policy frozen where several updates follow."""
        algorithm, batch = self.make(), self.make_batch()
        prepared = self.prepared(algorithm, batch)
        assert len(prepared) == len(batch), "prepare changed the number of sequences"
        added = set(prepared.tokens.values) - set(batch.tokens.values)
        for name in added:
            value = prepared[name]
            assert len(value) == batch.token_count
            assert not value.requires_grad, f"'{name}' carries gradients into every micro-batch"
            if value.is_floating_point():
                assert bool(value.isfinite().all()), f"'{name}' is not finite"
        if algorithm.needs_rollouts:
            assert {"advantages", "proximal_logprobs"} <= added, f"prepare added only {sorted(added)}"
            proximal = prepared["proximal_logprobs"]
            assert bool(torch.equal(proximal, batch["actor_logprobs"])), "the proximal policy is not the actor"
            single = self.prepared(algorithm, batch, updates=1)
            assert single["advantages"].shape == (batch.token_count,)

    def test_any_order_of_sequences_gives_the_same(self) -> None:
        """Nothing depends on where a sequence stands: groups are known by `group_id`."""
        algorithm, batch = self.make(), self.make_batch()
        wanted, sums = self.gradient(algorithm, algorithm.weigh(self.prepared(algorithm, batch)), [range(12)])
        order = torch.randperm(12, generator=torch.Generator().manual_seed(5)).tolist()
        moved = algorithm.weigh(self.prepared(algorithm, batch.select(order)))
        found, other = self.gradient(algorithm, moved, [range(12)])
        _same(found, wanted, self.tolerance, "the order of sequences matters")
        _same_sums(other, sums, "the order of sequences matters")

    def test_any_split_gives_the_same(self) -> None:
        """Loss, gradient and metrics add up to the same over any micro-batches, siblings apart included."""
        algorithm = self.make()
        weighed = algorithm.weigh(self.prepared(algorithm, self.make_batch()))
        wanted, sums = self.gradient(algorithm, weighed, [range(12)])
        assert float(wanted.abs().max()) > 0, "the loss has no gradient anywhere"
        for split in SPLITS:
            found, other = self.gradient(algorithm, weighed, split)
            _same(found, wanted, self.tolerance, f"split into {len(split)} micro-batches")
            _same_sums(other, sums, f"split into {len(split)} micro-batches")

    def test_tokens_out_of_the_loss_mask_are_not_learnt_from(self) -> None:
        """They have no gradient and no weight, and what they hold does not matter."""
        algorithm, batch = self.make(), self.make_batch()
        weighed = algorithm.weigh(self.prepared(algorithm, batch))
        assert float(weighed["loss_weights"][~weighed["loss_mask"]].abs().sum()) == 0, "a weight out of the mask"
        wanted, _ = self.gradient(algorithm, weighed, [range(12)])
        outside = ~batch["loss_mask"]
        assert float(wanted[:, outside].abs().max()) == 0, "tokens out of the mask have a gradient"
        noise = 20 * torch.randn(batch.token_count, generator=torch.Generator().manual_seed(3))
        keys = ("logprobs", "actor_logprobs", "reference_logprobs_made")
        spoiled = batch.with_tokens(**{key: torch.where(outside, noise, batch[key]) for key in keys})
        found, _ = self.gradient(algorithm, algorithm.weigh(self.prepared(algorithm, spoiled)), [range(12)])
        _same(found, wanted, self.tolerance, "tokens out of the mask influence others")

    def test_denominators_come_before_masking(self) -> None:
        """`weigh` counts the tokens of `loss_mask`; how far the policies are apart leaves its weights as they are."""
        algorithm, batch = self.make(), self.make_batch()
        near = algorithm.weigh(self.prepared(algorithm, batch))["loss_weights"]
        far = batch.with_tokens(logprobs=torch.where(batch.tokens.row_index == 4, -30.0, batch["logprobs"]))
        weights = algorithm.weigh(self.prepared(algorithm, far))["loss_weights"]
        _same(weights, near, 0.0, "the weights of tokens depend on the policies")

    def test_the_gradient_on_policy_is_the_policy_gradient(self) -> None:
        """-A times the token's weight, summed over each sequence; in particular none flows through the advantage."""
        algorithm, batch = self.make(), self.make_batch()
        if not (self.is_policy_gradient and algorithm.needs_rollouts):
            return
        batch = batch.with_tokens(actor_logprobs=batch["logprobs"], reference_logprobs_made=batch["logprobs"])
        for updates in (1, 2):
            weighed = algorithm.weigh(self.prepared(algorithm, batch, updates))
            gradients, _ = self.gradient(algorithm, weighed, [range(12)])
            index, rows = batch.tokens.row_index, torch.zeros(12)
            found = rows.index_add(0, index, gradients[list(algorithm.outputs).index("logprobs")])
            each = torch.where(batch["loss_mask"], -weighed["advantages"] * weighed["loss_weights"], 0.0)
            _same(found, rows.index_add(0, index, each), self.tolerance, "on policy the gradient is not REINFORCE's")


def _same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, message: str) -> None:
    worst = float((found - wanted).abs().max())
    assert worst <= tolerance, f"{message}: values differ by {worst:.7f}"


def _same_sums(found: dict[str, float], wanted: dict[str, float], message: str) -> None:
    assert found.keys() == wanted.keys(), f"{message}: metrics {sorted(found)} instead of {sorted(wanted)}"
    for name, value in wanted.items():
        assert abs(found[name] - value) <= 1e-4 * max(1.0, abs(value)), (
            f"{message}: {name} is {found[name]:.6f} instead of {value:.6f}"
        )
