"""Conformance tests of engines that compute a divergence between two roles (`areal_core.engines.ComparingEngine`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.engines import ComparingEngine
from areal_core.sdk import REFERENCE, LossResult
from areal_testing.conformance.models import load_reference
from areal_testing.conformance.training_session import (
    STILL,
    TrainingSession,
    make_training_batch,
    parameters_of,
    same_tensors,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_core.data import PackedBatch

BETAS = (0.0, 0.25, 1.0)
TEMPERATURE = 0.7


class Divergences(TrainingSession):
    """Tests of divergences; part of `TrainEngineSuite`. Engines that compare no roles skip them."""

    def test_a_divergence_matches_its_definition(self, tmp_path: Path) -> None:
        """The divergence of each token's whole distribution, and its gradient, match automatic differentiation."""
        batch = make_training_batch()
        models = [self.make_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
        learner, compared = (load_reference(model) for model in models)
        for beta in BETAS:
            name = f"divergence:{REFERENCE.name}:{beta}"
            expected = _divergence(learner, compared, batch, beta)
            learner.zero_grad()
            (expected * batch["loss_weights"]).sum().backward()  # type: ignore[no-untyped-call]
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in learner.parameters() if p.grad is not None]))

            def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor], name: str = name) -> LossResult:
                return LossResult((outputs[name] * part["loss_weights"]).sum())

            with (
                self.engine(models[0], temperature=TEMPERATURE, max_tokens_per_microbatch=40, **STILL) as engine,
                self.engine(models[1], temperature=TEMPERATURE, role=REFERENCE) as frozen,
            ):
                if not isinstance(engine, ComparingEngine):
                    pytest.skip("this engine compares no roles")
                engine.compare_with({"actor": engine, REFERENCE.name: frozen})
                column = engine.forward(batch, [name])[name]
                metrics = train(engine, batch, loss, [name])
            worst = float((column - expected.detach()).abs().max())
            assert worst <= self.tolerance, f"the divergence at beta {beta} differs from its formula by {worst:.6f}"
            expected_loss = float((expected.detach() * batch["loss_weights"]).sum())
            assert metrics["loss"] == pytest.approx(expected_loss, rel=self.gradient_tolerance, abs=1e-6), (
                f"at beta {beta} the loss is {metrics['loss']:.6f} instead of {expected_loss:.6f}"
            )
            assert metrics["gradient_norm"] == pytest.approx(norm, rel=self.gradient_tolerance, abs=1e-6), (
                f"at beta {beta} the gradient's norm is {metrics['gradient_norm']:.6f}, by automatic differentiation "
                f"{norm:.6f}"
            )

    def test_training_on_a_divergence_lowers_it(self, tmp_path: Path) -> None:
        """The gradient has the right direction, which its norm does not show. The other role does not change."""
        batch, name = make_training_batch(), f"divergence:{REFERENCE.name}:0.25"
        models = [self.make_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]

        def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            return LossResult((outputs[name] * part["loss_weights"]).sum())

        with self.engine(models[0]) as engine, self.engine(models[1], role=REFERENCE) as frozen:
            if not isinstance(engine, ComparingEngine):
                pytest.skip("this engine compares no roles")
            engine.compare_with({"actor": engine, REFERENCE.name: frozen})
            before = parameters_of(frozen)
            losses = [train(engine, batch, loss, [name])["loss"] for _ in range(4)]
            assert losses[-1] < losses[0], f"the divergence went from {losses[0]:.4f} to {losses[-1]:.4f}"
            same_tensors(before, parameters_of(frozen), "the role that the engine compares with has changed")


def _divergence(learner: torch.nn.Module, compared: torch.nn.Module, batch: PackedBatch, beta: float) -> torch.Tensor:
    """Return the divergence of each token by its definition, [sum(T)] float64 with gradients, a sequence at a time."""
    divergences = []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        q, p = (
            torch.softmax(model(input_ids=ids[None]).logits[0].double() / TEMPERATURE, -1)
            for model in (learner, compared)
        )
        p = p.detach()
        mixed = beta * p + (1 - beta) * q
        to_p, to_q = (mixed, mixed) if 0 < beta < 1 else (q, p)
        of_p, of_q = ((part * (part.log() - to.log())).sum(-1) for part, to in ((p, to_p), (q, to_q)))
        divergences.append({0.0: of_p, 1.0: of_q}.get(beta, beta * of_p + (1 - beta) * of_q))
    return torch.cat(divergences)
