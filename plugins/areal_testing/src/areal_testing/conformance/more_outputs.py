"""Conformance tests of the outputs of train engines that are optional: `top_logprobs` and `sum_pi_squared`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.sdk import LossResult
from areal_testing.conformance.models import VOCABULARY, load_reference
from areal_testing.conformance.training_session import STILL, TrainingSession, make_training_batch, train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.sdk import Loss

TEMPERATURE, TOPS = 0.7, 4


class MoreOutputs(TrainingSession):
    """Tests of optional outputs; part of `TrainEngineSuite`. See `TrainingSession.more_outputs`."""

    def test_top_logprobs_are_those_of_the_tokens_in_the_batch(self, tmp_path: Path) -> None:
        """Values and gradients of log-probabilities at `top_ids` match automatic differentiation, in their order."""
        self._skip_without("top_logprobs")
        batch = make_training_batch()
        generator = torch.Generator().manual_seed(3)
        shape = (batch.token_count, TOPS)
        top_ids = torch.randint(VOCABULARY, shape, generator=generator, dtype=torch.int32)
        batch = batch.with_tokens(top_ids=top_ids, coefficients=torch.randn(shape, generator=generator))

        def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            values = outputs["top_logprobs"]
            assert values.shape == part["top_ids"].shape, f"top_logprobs has the shape {tuple(values.shape)}"
            per_token = (part["coefficients"] * values).sum(-1) - outputs["logprobs"]
            return LossResult((part["loss_weights"] * per_token).sum())

        def expected(table: torch.Tensor) -> dict[str, torch.Tensor]:
            values = table.gather(1, top_ids.long())
            return {"top_logprobs": values, "logprobs": table.gather(1, batch["targets"][:, None])[:, 0]}

        self._compare(tmp_path, batch, ["logprobs", "top_logprobs"], loss, expected)

    def test_sum_pi_squared_matches_its_definition(self, tmp_path: Path) -> None:
        """The sum of squared probabilities of each position, and its gradient, match automatic differentiation."""
        self._skip_without("sum_pi_squared")
        batch, name = make_training_batch(), "sum_pi_squared"

        def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
            return LossResult((part["loss_weights"] * outputs[name]).sum())

        def expected(table: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: table.exp().square().sum(-1)}

        self._compare(tmp_path, batch, [name], loss, expected, forwarded=[name])

    def _skip_without(self, output: str) -> None:
        if output not in self.more_outputs:
            pytest.skip(f"the suite does not list {output} in more_outputs")

    def _compare(
        self,
        folder: Path,
        batch: PackedBatch,
        names: Sequence[str],
        loss: Loss,
        expected: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        forwarded: Sequence[str] = (),
    ) -> None:
        """Compare outputs, loss and gradient with those of transformers' model.

        Args:
            folder: for models.
            batch: the batch.
            names: outputs that the loss reads.
            loss: the loss.
            expected: returns the outputs from log-distributions [sum(T), vocabulary].
            forwarded: outputs of which `forward` is compared, too.
        """
        for architecture in self.architectures:
            model = self.make_model(folder / architecture, architecture)
            learner = load_reference(model)
            sequences = torch.split(batch["input_ids"], batch.lengths.tolist())
            logits = torch.cat([learner(input_ids=ids[None]).logits[0] for ids in sequences])
            outputs = expected(torch.log_softmax(logits.double() / TEMPERATURE, -1))
            exact = loss(batch, outputs).loss
            exact.backward()  # type: ignore[no-untyped-call]
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in learner.parameters() if p.grad is not None]))
            for budget in (4096, 40):
                with self.engine(model, temperature=TEMPERATURE, max_tokens_per_microbatch=budget, **STILL) as engine:
                    columns = engine.forward(batch, forwarded) if forwarded else {}
                    metrics = train(engine, batch, loss, names)
                for name, column in columns.items():
                    worst = float((column - outputs[name].detach()).abs().max())
                    assert worst <= self.tolerance, f"{architecture}: {name} differs from its formula by {worst:.6f}"
                for key, value in {"loss": float(exact.detach()), "gradient_norm": norm}.items():
                    assert metrics[key] == pytest.approx(value, rel=self.gradient_tolerance, abs=1e-6), (
                        f"{architecture}, outputs {', '.join(names)}: {key} is {metrics[key]:.6f}, by automatic "
                        f"differentiation {value:.6f}"
                    )
