"""Conformance tests of a training engine's checkpoints, exports, parameters and roles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from areal_core.engines import SnapshotEngine
from areal_core.errors import RunError
from areal_core.sdk import CRITIC, REFERENCE
from areal_testing.conformance.models import load_reference, reference_outputs
from areal_testing.conformance.training_session import (
    OUTPUTS,
    REWARD_MODEL,
    TrainingSession,
    check_description,
    likelihood_loss,
    make_training_batch,
    parameters_of,
    policy_loss,
    same_tensors,
    train,
    value_loss,
)

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.engines import TrainEngine
    from areal_core.sdk import Loss, Role


class CheckpointsAndRoles(TrainingSession):
    """Tests of `save`, `load`, `export`, `named_full_parameters` and of the roles; part of `TrainEngineSuite`."""

    def test_parameters_are_named_as_in_the_files(self, tmp_path: Path) -> None:
        """The engine yields each parameter once, tied ones too, by its name in the file."""
        from safetensors.torch import load_file

        for architecture in self.architectures:
            model = self.make_model(tmp_path / architecture, architecture)
            with self.engine(model) as engine:
                same_tensors(
                    parameters_of(engine), load_file(model / "model.safetensors"), f"{architecture}: parameters"
                )
                check_description(engine)

    def test_a_checkpoint_continues_bit_for_bit(self, tmp_path: Path) -> None:
        """An engine that loads a checkpoint (parameters, optimizer, random state) continues exactly as the first."""
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model) as engine:
            for _ in range(3):
                train(engine, batch, policy_loss, OUTPUTS)
            engine.save(tmp_path / "checkpoint")
            saved, noise = parameters_of(engine), torch.rand(4)
            first = [train(engine, batch, policy_loss, OUTPUTS) for _ in range(2)]
            expected = parameters_of(engine)
        with self.engine(model) as engine:
            train(engine, batch, likelihood_loss, ["logprobs"])
            engine.load(tmp_path / "checkpoint")
            assert torch.equal(torch.rand(4), noise), "the random state was not restored"
            same_tensors(parameters_of(engine), saved, "after load")
            again = [train(engine, batch, policy_loss, OUTPUTS) for _ in range(2)]
            same_tensors(parameters_of(engine), expected, "two updates after load (is the optimizer's state saved?)")
            assert again == first, f"metrics after load are {again[0]}, without a stop {first[0]}"

    def test_a_snapshot_is_of_its_moment(self, tmp_path: Path) -> None:
        """A snapshot holds the state of the moment when it was taken, though a thread writes it after further training.

        The test takes two snapshots, because the second may reuse the memory of the first.
        """
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model) as engine:
            if not isinstance(engine, SnapshotEngine):
                pytest.skip("the engine makes no snapshots")
            for number in range(2):
                train(engine, batch, policy_loss, OUTPUTS)
                write = engine.snapshot()
                saved, noise = parameters_of(engine), torch.rand(4)
                expected = [train(engine, batch, policy_loss, OUTPUTS) for _ in range(2)]
                last = parameters_of(engine)
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(write, tmp_path / str(number)).result()
                same_tensors(parameters_of(engine), last, "writing a snapshot has changed the engine")
                with self.engine(model) as other:
                    other.load(tmp_path / str(number))
                    same_tensors(parameters_of(other), saved, f"snapshot {number + 1} after further training")
                    assert torch.equal(torch.rand(4), noise), f"snapshot {number + 1}: the random state differs"
                    again = [train(other, batch, policy_loss, OUTPUTS) for _ in range(2)]
                    assert again == expected, f"snapshot {number + 1}: metrics are {again[0]}, not {expected[0]}"

    def test_a_snapshot_reports_its_memory(self, tmp_path: Path) -> None:
        """`snapshot_size` is at least the size of this rank's parameters if no earlier snapshot's memory is reused."""
        with self.engine(self.make_model(tmp_path / "model")) as engine:
            if not isinstance(engine, SnapshotEngine):
                pytest.skip("the engine makes no snapshots")
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            least, size = sum(value.nbytes for value in parameters_of(engine).values()) / ranks, engine.snapshot_size()
            assert size >= least, (
                f"the engine reports that a snapshot takes {size} bytes, the parameters alone are {least:.0f}"
            )

    def test_a_missing_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        """`load` raises an error if the checkpoint does not exist. It does not start from the initial state."""
        with self.engine(self.make_model(tmp_path / "model")) as engine, pytest.raises(RunError):
            engine.load(tmp_path / "nothing")

    def test_an_export_is_the_model_after_the_last_update(self, tmp_path: Path) -> None:
        """Both transformers and this engine load an export as the model after the last update."""
        batch = make_training_batch()
        for architecture in self.architectures:
            model = self.make_model(tmp_path / architecture, architecture)
            target = tmp_path / f"export_{architecture}"
            with self.engine(model) as engine:
                for _ in range(2):
                    train(engine, batch, policy_loss, OUTPUTS)
                engine.export(target)
                expected, current = engine.forward(batch, ["logprobs"])["logprobs"], parameters_of(engine)
            with torch.no_grad():
                actual = reference_outputs(load_reference(target), batch, 1.0)["logprobs"].float()
            worst = float((actual - expected).abs().max())
            assert worst <= self.tolerance, f"{architecture}: the export differs from the engine by {worst:.6f}"
            with self.engine(target) as engine:
                same_tensors(parameters_of(engine), current, f"{architecture}: loaded from the export")

    def test_a_reference_never_learns(self, tmp_path: Path) -> None:
        """A reference computes the same outputs as an actor, and refuses to be trained."""
        self._need(REFERENCE)
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model) as engine:
            expected = engine.forward(batch, OUTPUTS)
        with self.engine(model, role=REFERENCE) as engine:
            actual = engine.forward(batch, OUTPUTS)
            for name in OUTPUTS:
                worst = float((actual[name] - expected[name]).abs().max())
                assert worst <= self.tolerance, f"{name} of the reference differs from the actor's by {worst:.6f}"
            self._stays_frozen(engine, likelihood_loss, "logprobs")

    def test_a_critic_learns_values(self, tmp_path: Path) -> None:
        """A critic computes one value for each token, from the tokens up to it in its own sequence only."""
        self._need(CRITIC)
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, role=CRITIC, learning_rate=3e-3, max_tokens_per_microbatch=60) as engine:
            losses = [train(engine, batch, value_loss, ["values"])["loss"] for _ in range(20)]
            assert losses[-1] < 0.8 * losses[0], f"the critic's loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
            values = engine.forward(batch, ["values"])["values"]
            assert values.shape == (batch.token_count,)
            assert values.dtype == torch.float32
            changed = batch["input_ids"].clone()
            place = int(batch.tokens.offsets[4]) - 1  # the last token of the fourth sequence
            changed[place] = (changed[place] + 1) % 61
            moved = engine.forward(batch.with_tokens(input_ids=changed), ["values"])["values"]
            differing = ((moved - values).abs() > self.tolerance).nonzero()[:, 0].tolist()
            assert differing == [place], f"another token at {place} changes the values at {differing}"

    def test_a_trained_critic_is_a_reward_model(self, tmp_path: Path) -> None:
        """The export of a critic, loaded in a frozen scalar role, gives the same values."""
        self._need(CRITIC, REWARD_MODEL)
        model, batch = self.make_model(tmp_path / "model"), make_training_batch()
        with self.engine(model, role=CRITIC, learning_rate=3e-3) as engine:
            train(engine, batch, value_loss, ["values"])
            expected = engine.forward(batch, ["values"])["values"]
            engine.export(tmp_path / "export")
        with self.engine(tmp_path / "export", role=REWARD_MODEL) as engine:
            worst = float((engine.forward(batch, ["values"])["values"] - expected).abs().max())
            assert worst <= self.tolerance, f"the reward model's values differ from the critic's by {worst:.6f}"
            self._stays_frozen(engine, value_loss, "values")

    def _need(self, *roles: Role) -> None:
        if missing := [role.name for role in roles if role not in self.roles]:
            pytest.skip(f"the engine does not support the role {', '.join(missing)}")

    @staticmethod
    def _stays_frozen(engine: TrainEngine, loss: Loss, output: str) -> None:
        """Assert that `train` raises RunError, and that the parameters stay the same even if it does not."""
        before, refused = parameters_of(engine), False
        try:
            train(engine, make_training_batch(), loss, [output])
        except RunError:
            refused = True
        same_tensors(parameters_of(engine), before, "a frozen role has learned")
        assert refused, "training a frozen role raised no error: it must raise RunError"
