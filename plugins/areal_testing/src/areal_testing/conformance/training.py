"""What every training engine must do: `areal_core.engines.TrainEngine` as tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, EMA, LossResult, LossSpec, Role
from areal_testing.conformance.checkpoints import CheckpointsAndRoles
from areal_testing.conformance.divergence import Divergences
from areal_testing.conformance.models import load_reference, make_model, reference_outputs
from areal_testing.conformance.training_session import (
    OUTPUTS,
    STILL,
    likelihood_loss,
    make_training_batch,
    numbers_of,
    parameters_of,
    policy_loss,
    same_tensors,
    train,
    value_loss,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch

TEMPERATURES = (0.7, 1.0, 1.3)
BUDGETS = (4096, 60, 31)
"""Tokens of a micro-batch: all at once, and in several parts."""


class TrainEngineSuite(CheckpointsAndRoles, Divergences):
    """Inherit, override `make_engine`; see `TrainingSession` for what else may be set."""

    def test_logprobs_are_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """Of `targets`, at three temperatures, in the order of the batch whatever the micro-batches."""
        self._compare_forward(tmp_path, "logprobs")

    def test_entropy_is_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """In nats, never negative."""
        self._compare_forward(tmp_path, "entropy")

    def _compare_forward(self, folder: Path, output: str) -> None:
        batch = make_training_batch()
        for architecture in self.architectures:
            model = make_model(folder / architecture, architecture=architecture)
            reference = load_reference(model)
            for temperature in TEMPERATURES:
                with torch.no_grad():
                    wanted = reference_outputs(reference, batch, temperature)[output].float()
                with self.engine(model, temperature=temperature, max_tokens_per_microbatch=40) as engine:
                    found = engine.forward(batch, OUTPUTS)[output]
                assert found.dtype == torch.float32, f"{output} has the dtype {found.dtype}"
                assert found.device.type == "cpu", f"{output} lies on {found.device}"
                assert found.shape == wanted.shape, f"{output} has the shape {tuple(found.shape)}"
                worst = float((found - wanted).abs().max())
                assert worst <= self.tolerance, (
                    f"{architecture} at temperature {temperature}: {output} differs from a plain forward pass of "
                    f"each sequence by {worst:.6f}"
                )

    def test_micro_batches_leave_the_order_of_a_batch(self, tmp_path: Path) -> None:
        """`forward` gives the same for any token budget, position by position."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        found = []
        for budget in BUDGETS:
            with self.engine(model, max_tokens_per_microbatch=budget) as engine:
                found.append(engine.forward(batch, ["logprobs"])["logprobs"])
        for budget, values in zip(BUDGETS[1:], found[1:], strict=True):
            worst = float((values - found[0]).abs().max())
            assert worst <= self.tolerance, f"a budget of {budget} tokens changes or reorders values, by {worst:.6f}"

    def test_the_gradient_is_that_of_the_whole_loss(self, tmp_path: Path) -> None:
        """Loss and norm of the gradient against automatic differentiation through transformers' own model."""
        batch = make_training_batch()
        for architecture in self.architectures:
            model = make_model(tmp_path / architecture, architecture=architecture)
            for temperature in TEMPERATURES:
                self._compare_gradient(model, batch, temperature)

    def test_single_tokens_have_their_own_gradient(self, tmp_path: Path) -> None:
        """The loss of one token alone: nothing is shifted, padded or taken from a neighbor."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        for place in batch["loss_mask"].nonzero()[:, 0][[0, 7, 20, -1]].tolist():
            alone = torch.zeros(batch.token_count)
            alone[place] = 1.0
            self._compare_gradient(model, batch.with_tokens(loss_weights=alone), 0.7)

    def _compare_gradient(self, model: Path, batch: PackedBatch, temperature: float) -> None:
        reference = load_reference(model)
        loss = policy_loss(batch, reference_outputs(reference, batch, temperature)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]))
        with self.engine(model, temperature=temperature, max_tokens_per_microbatch=40, **STILL) as engine:
            metrics = train(engine, batch, policy_loss, OUTPUTS)
        wanted = {"loss": float(loss.detach()), "gradient_norm": norm, "tokens": float(batch["loss_mask"].sum())}
        wanted["sequences"] = float(len(batch))
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=self.gradient_tolerance, abs=1e-6), (
                f"at temperature {temperature} {name} is {metrics[name]:.6f}, by automatic differentiation {value:.6f}"
            )

    def test_micro_batches_add_up(self, tmp_path: Path) -> None:
        """Any token budget gives the same loss, gradient and metrics: sums, not means."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        found = []
        for budget in BUDGETS:
            with self.engine(model, max_tokens_per_microbatch=budget, **STILL) as engine:
                found.append(train(engine, batch, policy_loss, OUTPUTS))
        for budget, metrics in zip(BUDGETS[1:], found[1:], strict=True):
            assert metrics.keys() == found[0].keys(), f"metrics differ: {sorted(metrics.keys() ^ found[0].keys())}"
            for name, value in found[0].items():
                assert metrics[name] == pytest.approx(value, rel=self.gradient_tolerance, abs=1e-6), (
                    f"{name} is {metrics[name]:.6f} in micro-batches of {budget} tokens, {value:.6f} in one"
                )

    def test_metrics_are_put_together_by_their_kind(self, tmp_path: Path) -> None:
        """Means by their weights, sums, maxima and histograms; one that a single micro-batch has is of that one."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        advantages, inside = batch["advantages"], batch["loss_mask"]
        with self.engine(model, max_tokens_per_microbatch=40, **STILL) as engine:
            logprobs = engine.forward(batch, ["logprobs"])["logprobs"]
            metrics = train(engine, batch, policy_loss, OUTPUTS)
        wanted = {
            "tokens": float(inside.sum()),
            "sequences": float(len(batch)),
            "logprob": float(logprobs[inside].mean()),
            "largest_advantage": float(advantages.max()),
            "advantage/below_-1": float((advantages < -1).float().mean()),
            "advantage/above": float((advantages >= 1).float().mean()),
            "first": float(advantages[0]),
        }
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, abs=self.tolerance), (
                f"{name} is {metrics[name]:.6f}, of the whole batch {value:.6f}"
            )

    def test_units_stay_whole(self, tmp_path: Path) -> None:
        """Sequences that belong together, such as the two sides of a preference, are in one micro-batch."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        sides = torch.arange(len(batch)).flip(0) % (len(batch) // 2)  # the two of a unit stand far apart
        batch = batch.with_units(sides, margin=torch.arange(float(len(batch) // 2)))
        seen: list[float] = []

        def preference(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            for unit, rows in enumerate(part.unit_rows):
                assert len(rows) == 2, f"a unit of two sequences was torn apart: {len(rows)} came into a micro-batch"
                margin = float(part["margin"][unit])
                groups = batch["group_id"][sides == int(margin)]
                assert sorted(part["group_id"][rows].tolist()) == sorted(groups.tolist()), (
                    "the values of a unit are those of another one"
                )
                seen.append(margin)
            return policy_loss(part, outputs)

        with self.engine(model, max_tokens_per_microbatch=60, **STILL) as engine:
            train(engine, batch, preference, OUTPUTS)
        assert sorted(seen) == list(range(len(batch) // 2)), f"the loss saw the units {sorted(seen)}"

    def test_the_loss_sees_every_token_once(self, tmp_path: Path) -> None:
        """With all its keys beside it, and with the outputs that `forward` gives, which carry gradients."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        seen: list[int] = []
        with self.engine(model, max_tokens_per_microbatch=40, **STILL) as engine:
            before = engine.forward(batch, OUTPUTS)

            def watch(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
                places = part["place"].cpu()
                seen.extend(places.tolist())
                for name in OUTPUTS:
                    assert outputs[name].requires_grad, f"{name} carries no gradients into the loss"
                    assert len(outputs[name]) == len(places), f"{name} is not as long as the micro-batch"
                    gap = float((outputs[name].detach().cpu() - before[name][places]).abs().max())
                    assert gap <= self.tolerance, f"{name} in the loss is not that of these tokens"
                for key in ("input_ids", "targets", "loss_mask", "advantages"):
                    assert bool((part[key].cpu() == batch[key][places]).all()), f"'{key}' is not that of these tokens"
                rows = batch.tokens.row_index[places[part.tokens.offsets[:-1].cpu()]]
                for key in ("group_id", "reward"):
                    assert bool((part[key].cpu() == batch[key][rows]).all()), f"'{key}' is of other sequences"
                return policy_loss(part, outputs)

            train(engine, batch, watch, OUTPUTS)
        assert sorted(seen) == list(range(batch.token_count)), (
            f"the loss saw {len(seen)} tokens, {len(set(seen))} of them different, of a batch of {batch.token_count}"
        )

    def test_several_works_are_one_update(self, tmp_path: Path) -> None:
        """Parts of different batches and losses: the sum of the losses, the gradient of the sum, one optimizer step."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        works = [
            LossSpec("any", batch.select(range(5)), OUTPUTS, policy_loss),
            LossSpec("any", batch.select(range(3, 12)), ("logprobs",), likelihood_loss),
        ]

        def both(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            first = part.with_tokens(loss_weights=part["loss_weights"] * part["first"])
            second = part.with_tokens(loss_weights=part["loss_weights"] * part["second"])
            return LossResult(policy_loss(first, outputs).loss + likelihood_loss(second, outputs).loss)

        index = batch.tokens.row_index
        whole = batch.with_tokens(first=(index < 5).float(), second=(index >= 3).float())
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            found, parameters = numbers_of(engine.train(works)), parameters_of(engine)
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            wanted, expected = train(engine, whole, both, OUTPUTS), parameters_of(engine)
        for name in ("loss", "gradient_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=self.gradient_tolerance, abs=1e-6), (
                f"{name} is {found[name]:.6f} of two works, {wanted[name]:.6f} of both in one"
            )
        worst = max(float((parameters[name] - value).abs().max()) for name, value in expected.items())
        assert worst <= self.tolerance, f"the update is not that of both: parameters differ by {worst:.6f}"

    def test_an_average_follows(self, tmp_path: Path) -> None:
        """A frozen role moves towards another one, and a checkpoint keeps the average."""
        role = Role("average", ema=EMA(ACTOR.name, decay=0.75))
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model) as actor, self.engine(model, role=role) as average:
            before = parameters_of(average)
            for _ in range(3):
                train(actor, batch, policy_loss, OUTPUTS)
            average.update_ema(actor, 0.75)
            found, leader = parameters_of(average), parameters_of(actor)
            for name, value in found.items():
                wanted = 0.75 * before[name] + 0.25 * leader[name]
                worst = float((value - wanted).abs().max())
                assert worst <= 1e-6, f"after a step of the average {name} is off by {worst:.8f}"
            average.save(tmp_path / "checkpoint")
            average.update_ema(actor, 0.0)
            same_tensors(parameters_of(average), leader, "an average that keeps nothing of itself is a copy")
            average.load(tmp_path / "checkpoint")
            same_tensors(parameters_of(average), found, "an average after load")

    def test_an_average_may_be_of_a_critic(self, tmp_path: Path) -> None:
        """Its head is new as the critic's is, and the same."""
        if CRITIC not in self.roles:
            pytest.skip("the engine does not play the role critic")
        role = Role("target", head="scalar", ema=EMA(CRITIC.name, decay=0.5))
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, role=CRITIC) as critic, self.engine(model, role=role) as target:
            same_tensors(parameters_of(target), parameters_of(critic), "an average of a critic begins as the critic")
            train(critic, batch, value_loss, ["values"])
            target.update_ema(critic, 0.0)
            same_tensors(parameters_of(target), parameters_of(critic), "an average of a critic after a copy")

    def test_each_update_has_its_own_gradient(self, tmp_path: Path) -> None:
        """Nothing of the last one is left in it."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, **STILL) as engine:
            norms = [train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"] for _ in range(3)]
        assert norms[1:] == pytest.approx(norms[:1] * 2, rel=self.gradient_tolerance), f"norms {norms} of equal updates"

    def test_the_gradient_norm_is_that_before_clipping(self, tmp_path: Path) -> None:
        """It is what tells a reader that something is wrong; clipped it would always look right."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        found = []
        for limit in (None, 1e-3):
            with self.engine(model, **{**STILL, "max_gradient_norm": limit}) as engine:
                found.append(train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"])
        assert found[1] == pytest.approx(found[0], rel=self.gradient_tolerance), (
            f"with clipping at 0.001 the norm is reported as {found[1]}, without as {found[0]}"
        )

    def test_training_makes_likely_what_the_loss_asks_for(self, tmp_path: Path) -> None:
        """Twenty updates on the likelihood of a batch, which falls in the metrics and in `forward`."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, learning_rate=3e-3) as engine:
            metrics = [train(engine, batch, likelihood_loss, ["logprobs"]) for _ in range(20)]
            seen = float(-(engine.forward(batch, ["logprobs"])["logprobs"] * batch["loss_weights"]).sum())
            then = train(engine, batch, likelihood_loss, ["logprobs"])["loss"]
        losses = [each["loss"] for each in metrics]
        assert losses[-1] < 0.8 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
        assert abs(seen - then) <= self.tolerance, (
            f"forward does not know the updates: the loss of its values is {seen:.4f}, that of training {then:.4f}"
        )
        for each in metrics:
            assert each["skipped"] == 0.0
            assert 0 < each["learning_rate"] <= 3e-3 * (1 + 1e-6), f"learning rate {each['learning_rate']}"

    def test_a_gradient_that_is_not_finite_changes_nothing(self, tmp_path: Path) -> None:
        """It is reported, and the next update is as if it had not been."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()

        def poisoned(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            return LossResult(outputs["logprobs"].sum() * torch.nan)

        with self.engine(model, learning_rate=1e-3) as engine:
            before = parameters_of(engine)
            assert train(engine, batch, poisoned, ["logprobs"])["skipped"] == 1.0, "a gradient of NaN was not skipped"
            same_tensors(parameters_of(engine), before, "a gradient of NaN was applied")
            clean = train(engine, batch, policy_loss, OUTPUTS)
            found = parameters_of(engine)
        with self.engine(model, learning_rate=1e-3) as engine:
            assert clean["gradient_norm"] == train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"]
            same_tensors(found, parameters_of(engine), "a skipped update left something behind")

    def test_an_update_in_which_no_token_counts_changes_nothing(self, tmp_path: Path) -> None:
        """Momentum of former updates does not move the parameters either."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        nothing = batch.with_tokens(loss_weights=torch.zeros_like(batch["loss_weights"]))
        with self.engine(model, learning_rate=1e-3) as engine:
            train(engine, batch, policy_loss, OUTPUTS)
            before = parameters_of(engine)
            metrics = train(engine, nothing, policy_loss, OUTPUTS)
            same_tensors(parameters_of(engine), before, "an update in which no token counts moved the parameters")
            assert metrics["gradient_norm"] == 0.0

    def test_the_batch_stays_as_it_was(self, tmp_path: Path) -> None:
        """It is used again: for the next update, and for the consumption log."""
        model, batch = make_model(tmp_path / "model"), make_training_batch()
        before = batch.to_bytes()
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            engine.forward(batch, OUTPUTS)
            train(engine, batch, policy_loss, OUTPUTS)
        assert batch.to_bytes() == before, "the engine changed the batch that it was given"

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        """Is refused by RunError; closing is safe all the same, and twice."""
        with pytest.raises(RunError), self.engine(tmp_path / "nothing", role=ACTOR):
            pass
        with self.engine(make_model(tmp_path / "model")) as engine:
            engine.close()
