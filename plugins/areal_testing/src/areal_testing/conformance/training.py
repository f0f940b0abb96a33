"""Conformance suite of training engines (`areal_core.engines.TrainEngine`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, EMA, LossResult, LossSpec, Role
from areal_testing.conformance.checkpoints import CheckpointsAndRoles
from areal_testing.conformance.divergence import Divergences
from areal_testing.conformance.models import load_reference, reference_outputs
from areal_testing.conformance.more_outputs import MoreOutputs
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
"""Token budgets of a micro-batch: one micro-batch, or several."""


class TrainEngineSuite(CheckpointsAndRoles, Divergences, MoreOutputs):
    """Tests of a training engine. Override `make_engine`; see `TrainingSession` for the attributes that may be set."""

    def test_logprobs_are_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """Log-probabilities of `targets` match a plain forward pass at three temperatures, in the batch's order."""
        self._compare_forward(tmp_path, "logprobs")

    def test_entropy_is_of_the_tempered_distribution(self, tmp_path: Path) -> None:
        """Entropies, in nats, match a plain forward pass at three temperatures."""
        self._compare_forward(tmp_path, "entropy")

    def _compare_forward(self, folder: Path, output: str) -> None:
        batch = make_training_batch()
        for architecture in self.architectures:
            model = self.make_model(folder / architecture, architecture)
            reference = load_reference(model)
            for temperature in TEMPERATURES:
                with torch.no_grad():
                    expected = reference_outputs(reference, batch, temperature)[output].float()
                with self.engine(model, temperature=temperature, max_tokens_per_microbatch=40) as engine:
                    actual = engine.forward(batch, OUTPUTS)[output]
                assert actual.dtype == torch.float32, f"{output} has the dtype {actual.dtype}"
                assert actual.device.type == "cpu", f"{output} is on {actual.device}"
                assert actual.shape == expected.shape, f"{output} has the shape {tuple(actual.shape)}"
                worst = float((actual - expected).abs().max())
                assert worst <= self.tolerance, (
                    f"{architecture} at temperature {temperature}: {output} differs from a plain forward pass of "
                    f"each sequence by {worst:.6f}"
                )

    def test_micro_batches_keep_the_order_of_a_batch(self, tmp_path: Path) -> None:
        """`forward` gives the same values for any token budget, position by position."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        outputs = []
        for budget in BUDGETS:
            with self.engine(model, max_tokens_per_microbatch=budget) as engine:
                outputs.append(engine.forward(batch, ["logprobs"])["logprobs"])
        for budget, values in zip(BUDGETS[1:], outputs[1:], strict=True):
            worst = float((values - outputs[0]).abs().max())
            assert worst <= self.tolerance, f"a budget of {budget} tokens changes or reorders values, by {worst:.6f}"

    def test_the_gradient_is_that_of_the_whole_loss(self, tmp_path: Path) -> None:
        """Loss and gradient norm match automatic differentiation through transformers' model."""
        batch = make_training_batch()
        for architecture in self.architectures:
            model = self.make_model(tmp_path / architecture, architecture)
            for temperature in TEMPERATURES:
                self._compare_gradient(model, batch, temperature)

    def test_a_single_token_has_the_right_gradient(self, tmp_path: Path) -> None:
        """The gradient of one token's loss is right: values are not shifted, padded or mixed with a neighbor's."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        for position in batch["loss_mask"].nonzero()[:, 0][[0, 7, 20, -1]].tolist():
            weights = torch.zeros(batch.token_count)
            weights[position] = 1.0
            self._compare_gradient(model, batch.with_tokens(loss_weights=weights), 0.7)

    def _compare_gradient(self, model: Path, batch: PackedBatch, temperature: float) -> None:
        reference = load_reference(model)
        loss = policy_loss(batch, reference_outputs(reference, batch, temperature)).loss
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]))
        with self.engine(model, temperature=temperature, max_tokens_per_microbatch=40, **STILL) as engine:
            metrics = train(engine, batch, policy_loss, OUTPUTS)
        expected = {"loss": float(loss.detach()), "gradient_norm": norm, "tokens": float(batch["loss_mask"].sum())}
        expected["sequences"] = float(len(batch))
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=self.gradient_tolerance, abs=1e-6), (
                f"at temperature {temperature} {name} is {metrics[name]:.6f}, by automatic differentiation {value:.6f}"
            )

    def test_micro_batches_add_up(self, tmp_path: Path) -> None:
        """Any token budget gives the same loss, gradient and metrics."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        results = []
        for budget in BUDGETS:
            with self.engine(model, max_tokens_per_microbatch=budget, **STILL) as engine:
                results.append(train(engine, batch, policy_loss, OUTPUTS))
        for budget, metrics in zip(BUDGETS[1:], results[1:], strict=True):
            assert metrics.keys() == results[0].keys(), f"metrics differ: {sorted(metrics.keys() ^ results[0].keys())}"
            for name, value in results[0].items():
                assert metrics[name] == pytest.approx(value, rel=self.gradient_tolerance, abs=1e-6), (
                    f"{name} is {metrics[name]:.6f} in micro-batches of {budget} tokens, {value:.6f} in one"
                )

    def test_metrics_are_combined_by_their_kind(self, tmp_path: Path) -> None:
        """Micro-batches' means (by weight), sums, maxima and histograms are combined, and one that few of them have."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        advantages, inside = batch["advantages"], batch["loss_mask"]
        with self.engine(model, max_tokens_per_microbatch=40, **STILL) as engine:
            logprobs = engine.forward(batch, ["logprobs"])["logprobs"]
            metrics = train(engine, batch, policy_loss, OUTPUTS)
        expected = {
            "tokens": float(inside.sum()),
            "sequences": float(len(batch)),
            "logprob": float(logprobs[inside].mean()),
            "largest_advantage": float(advantages.max()),
            "advantage/below_-1": float((advantages < -1).float().mean()),
            "advantage/above": float((advantages >= 1).float().mean()),
            "first": float(advantages[0]),
        }
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, abs=self.tolerance), (
                f"{name} is {metrics[name]:.6f}, of the whole batch {value:.6f}"
            )

    def test_sequence_groups_stay_whole(self, tmp_path: Path) -> None:
        """The sequences of a group, such as the two sides of a preference, are in one micro-batch."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        sides = torch.arange(len(batch)).flip(0) % (len(batch) // 2)  # the two sequences of a group are far apart
        batch = batch.with_units(sides, margin=torch.arange(float(len(batch) // 2)))
        seen: list[float] = []

        def preference(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            for unit, rows in enumerate(part.unit_rows):
                assert len(rows) == 2, f"a group of two sequences was split: a micro-batch has {len(rows)} of them"
                margin = float(part["margin"][unit])
                groups = batch["group_id"][sides == int(margin)]
                assert sorted(part["group_id"][rows].tolist()) == sorted(groups.tolist()), (
                    "a sequence group has the values of another one"
                )
                seen.append(margin)
            return policy_loss(part, outputs)

        with self.engine(model, max_tokens_per_microbatch=60, **STILL) as engine:
            train(engine, batch, preference, OUTPUTS)
        assert sorted(seen) == list(range(len(batch) // 2)), f"the loss saw the sequence groups {sorted(seen)}"

    def test_the_loss_sees_every_token_once(self, tmp_path: Path) -> None:
        """The loss gets each token once, with all its fields, and with differentiable outputs equal to `forward`'s."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        seen: list[int] = []
        with self.engine(model, max_tokens_per_microbatch=40, **STILL) as engine:
            outputs_before = engine.forward(batch, OUTPUTS)

            def watch(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
                positions = part["place"].cpu()
                seen.extend(positions.tolist())
                for name in OUTPUTS:
                    assert outputs[name].requires_grad, f"{name} carries no gradients into the loss"
                    assert len(outputs[name]) == len(positions), f"{name} is not as long as the micro-batch"
                    gap = float((outputs[name].detach().cpu() - outputs_before[name][positions]).abs().max())
                    assert gap <= self.tolerance, f"{name} in the loss is not that of these tokens"
                for key in ("input_ids", "targets", "loss_mask", "advantages"):
                    is_same = bool((part[key].cpu() == batch[key][positions]).all())
                    assert is_same, f"'{key}' is not that of these tokens"
                rows = batch.tokens.row_index[positions[part.tokens.offsets[:-1].cpu()]]
                for key in ("group_id", "reward"):
                    assert bool((part[key].cpu() == batch[key][rows]).all()), f"'{key}' is that of other sequences"
                return policy_loss(part, outputs)

            train(engine, batch, watch, OUTPUTS)
        assert sorted(seen) == list(range(batch.token_count)), (
            f"the loss saw {len(seen)} tokens, {len(set(seen))} of them different, of a batch of {batch.token_count}"
        )

    def test_several_loss_specs_are_one_update(self, tmp_path: Path) -> None:
        """Loss specs with different batches and losses give the sum of the losses and gradients, in one update."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        loss_specs = [
            LossSpec("any", batch.select(range(5)), OUTPUTS, policy_loss),
            LossSpec("any", batch.select(range(3, 12)), ("logprobs",), likelihood_loss),
        ]

        def sum_of_both(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            first = part.with_tokens(loss_weights=part["loss_weights"] * part["first"])
            second = part.with_tokens(loss_weights=part["loss_weights"] * part["second"])
            return LossResult(policy_loss(first, outputs).loss + likelihood_loss(second, outputs).loss)

        index = batch.tokens.row_index
        whole = batch.with_tokens(first=(index < 5).float(), second=(index >= 3).float())
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            actual, actual_parameters = numbers_of(engine.train(loss_specs)), parameters_of(engine)
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            expected, parameters = train(engine, whole, sum_of_both, OUTPUTS), parameters_of(engine)
        for name in ("loss", "gradient_norm"):
            assert actual[name] == pytest.approx(expected[name], rel=self.gradient_tolerance, abs=1e-6), (
                f"{name} is {actual[name]:.6f} with two loss specs, {expected[name]:.6f} with their sum in one"
            )
        worst = max(float((actual_parameters[name] - value).abs().max()) for name, value in parameters.items())
        assert worst <= self.tolerance, f"the update is not that of the sum: parameters differ by {worst:.6f}"

    def test_an_ema_follows_its_target(self, tmp_path: Path) -> None:
        """A frozen role moves towards the trained one, and a checkpoint keeps the average."""
        role = Role("average", ema=EMA(ACTOR.name, decay=0.75))
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model) as actor, self.engine(model, role=role) as average:
            before = parameters_of(average)
            for _ in range(3):
                train(actor, batch, policy_loss, OUTPUTS)
            average.update_ema(actor, 0.75)
            averaged, trained = parameters_of(average), parameters_of(actor)
            for name, value in averaged.items():
                expected = 0.75 * before[name] + 0.25 * trained[name]
                worst = float((value - expected).abs().max())
                assert worst <= 1e-6, f"after a step of the average {name} is off by {worst:.8f}"
            average.save(tmp_path / "checkpoint")
            average.update_ema(actor, 0.0)
            same_tensors(parameters_of(average), trained, "an average with a decay of 0 is a copy")
            average.load(tmp_path / "checkpoint")
            same_tensors(parameters_of(average), averaged, "an average after load")

    def test_an_ema_of_a_critic_starts_as_the_critic(self, tmp_path: Path) -> None:
        """The EMA of a critic starts with the critic's new head, and follows it."""
        if CRITIC not in self.roles:
            pytest.skip("the engine does not support the role critic")
        role = Role("target", head="scalar", ema=EMA(CRITIC.name, decay=0.5))
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, role=CRITIC) as critic, self.engine(model, role=role) as target:
            same_tensors(parameters_of(target), parameters_of(critic), "an average of a critic before training")
            train(critic, batch, value_loss, ["values"])
            target.update_ema(critic, 0.0)
            same_tensors(parameters_of(target), parameters_of(critic), "an average of a critic after a copy")

    def test_each_update_has_its_own_gradient(self, tmp_path: Path) -> None:
        """The gradient of an update contains nothing of the previous one."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, **STILL) as engine:
            norms = [train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"] for _ in range(3)]
        assert norms[1:] == pytest.approx(norms[:1] * 2, rel=self.gradient_tolerance), f"norms {norms} of equal updates"

    def test_the_gradient_norm_is_that_before_clipping(self, tmp_path: Path) -> None:
        """The metric is the norm before clipping: a clipped norm would hide that training diverges."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        norms = []
        for limit in (None, 1e-3):
            with self.engine(model, **{**STILL, "max_gradient_norm": limit}) as engine:
                norms.append(train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"])
        assert norms[1] == pytest.approx(norms[0], rel=self.gradient_tolerance), (
            f"with clipping at 0.001 the norm is reported as {norms[1]}, without as {norms[0]}"
        )

    def test_training_lowers_the_loss(self, tmp_path: Path) -> None:
        """Twenty updates on the negative log-likelihood of a batch lower it in the metrics and in `forward`."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, learning_rate=3e-3) as engine:
            metrics = [train(engine, batch, likelihood_loss, ["logprobs"]) for _ in range(20)]
            forward_loss = float(-(engine.forward(batch, ["logprobs"])["logprobs"] * batch["loss_weights"]).sum())
            train_loss = train(engine, batch, likelihood_loss, ["logprobs"])["loss"]
        losses = [update["loss"] for update in metrics]
        assert losses[-1] < 0.8 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
        assert abs(forward_loss - train_loss) <= self.tolerance, (
            f"forward does not use the updated parameters: its loss is {forward_loss:.4f}, that of training "
            f"{train_loss:.4f}"
        )
        for update in metrics:
            assert update["skipped"] == 0.0
            assert 0 < update["learning_rate"] <= 3e-3 * (1 + 1e-6), f"learning rate {update['learning_rate']}"

    def test_a_gradient_that_is_not_finite_changes_nothing(self, tmp_path: Path) -> None:
        """The engine skips and reports the update. The next update is as if the skipped one had not happened."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()

        def poisoned(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            return LossResult(outputs["logprobs"].sum() * torch.nan)

        with self.engine(model, learning_rate=1e-3) as engine:
            before = parameters_of(engine)
            assert train(engine, batch, poisoned, ["logprobs"])["skipped"] == 1.0, "a gradient of NaN was not skipped"
            same_tensors(parameters_of(engine), before, "a gradient of NaN was applied")
            clean = train(engine, batch, policy_loss, OUTPUTS)
            after = parameters_of(engine)
        with self.engine(model, learning_rate=1e-3) as engine:
            assert clean["gradient_norm"] == train(engine, batch, policy_loss, OUTPUTS)["gradient_norm"]
            same_tensors(after, parameters_of(engine), "a skipped update changed a later one")

    def test_an_update_without_loss_weights_changes_nothing(self, tmp_path: Path) -> None:
        """If all loss weights are 0, the momentum of earlier updates does not move the parameters either."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        weightless = batch.with_tokens(loss_weights=torch.zeros_like(batch["loss_weights"]))
        with self.engine(model, learning_rate=1e-3) as engine:
            train(engine, batch, policy_loss, OUTPUTS)
            before = parameters_of(engine)
            metrics = train(engine, weightless, policy_loss, OUTPUTS)
            same_tensors(parameters_of(engine), before, "an update in which no token counts moved the parameters")
            assert metrics["gradient_norm"] == 0.0

    def test_the_batch_stays_as_it_was(self, tmp_path: Path) -> None:
        """The engine does not change the batch, which the next update and the consumption log use."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        before = batch.to_bytes()
        with self.engine(model, max_tokens_per_microbatch=40) as engine:
            engine.forward(batch, OUTPUTS)
            train(engine, batch, policy_loss, OUTPUTS)
        assert batch.to_bytes() == before, "the engine changed the batch in place"

    def test_a_missing_model_is_an_error(self, tmp_path: Path) -> None:
        """`setup` raises RunError. `close` is safe after that, and may be called twice."""
        with pytest.raises(RunError), self.engine(tmp_path / "nothing", role=ACTOR):
            pass
        with self.engine(self.make_model(tmp_path / "model")) as engine:
            engine.close()
