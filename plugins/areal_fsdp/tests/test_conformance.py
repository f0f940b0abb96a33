"""The core's own suite for training engines."""

import pytest

from areal_core.config import select
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, EMA, Role
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.lora.adapter import install
from areal_fsdp.lora.settings import LoraSettings
from areal_testing.conformance import TrainEngineSuite, checkpoints, divergence, training

pytestmark = pytest.mark.slow


class TestFSDPEngine(TrainEngineSuite):
    more_outputs = ("top_logprobs", "sum_pi_squared")

    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings))


@pytest.mark.nightly
class TestWithActivationCheckpointing(TrainEngineSuite):
    more_outputs = ("top_logprobs", "sum_pi_squared")

    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings, activation_checkpointing="full", logprob_chunk_tokens=7))


@pytest.mark.nightly
class TestWithLittleMemory(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(
            FSDPConfig(
                **settings,
                activation_checkpointing="selective",
                optimizer_state_dtype="bfloat16",
                offload_optimizer=True,
            )
        )


@pytest.mark.nightly
class TestWithMuon(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(select("train_engines", {"type": "fsdp/fsdp", "optimizer": "muon", **settings}).settings)


@pytest.mark.nightly
class TestWithAdapter(TrainEngineSuite):
    """The reference model, which the suite differentiates with autograd, has the same adapter in PEFT's layers."""

    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings, adapter={"rank": 8}))

    @pytest.fixture(autouse=True)
    def _references_with_adapters(self, monkeypatch):
        load = training.load_reference

        def adapted(folder):
            model = load(folder)
            install(model, LoraSettings(rank=8), source=str(folder), learns=True)
            return model

        for module in (training, checkpoints, divergence):
            monkeypatch.setattr(module, "load_reference", adapted)

    def test_an_ema_follows_its_target(self, tmp_path):
        """A copy does; the average of two adapters is no adapter of their rank, which is said before anything runs."""
        model, batch = self.make_model(tmp_path / "model"), training.make_training_batch()
        copying = Role("average", ema=EMA(ACTOR.name))
        with self.engine(model, learning_rate=1e-2) as leader, self.engine(model, role=copying) as follower:
            for _ in range(3):
                training.train(leader, batch, training.policy_loss, training.OUTPUTS)
            follower.update_ema(leader, 0.0)
            training.same_tensors(training.parameters_of(follower), training.parameters_of(leader), "a copy")
        averaging = Role("average", ema=EMA(ACTOR.name, decay=0.5))
        with pytest.raises(RunError, match="can be copied, not averaged"), self.engine(model, role=averaging):
            pass

    def test_an_ema_of_a_critic_starts_as_the_critic(self, tmp_path):
        """A copy: its head is new as the critic's is, and the same."""
        role = Role("target", head="scalar", ema=EMA(CRITIC.name))
        model, batch = self.make_model(tmp_path / "model"), training.make_training_batch()
        with self.engine(model, role=CRITIC) as critic, self.engine(model, role=role) as target:
            training.same_tensors(training.parameters_of(target), training.parameters_of(critic), "at the beginning")
            training.train(critic, batch, training.value_loss, ["values"])
            target.update_ema(critic, 0.0)
            training.same_tensors(training.parameters_of(target), training.parameters_of(critic), "after a copy")

    def test_a_snapshot_reports_its_memory(self, tmp_path):
        """The size covers the adapter and its moments; the base is in no checkpoint."""
        model = self.make_model(tmp_path / "model")
        with self.engine(model) as engine:
            shapes = {name: value.shape for name, value in engine.named_full_parameters()}
            least = 3 * 4 * LoraSettings(rank=8).parameters(shapes)
            assert least <= engine.snapshot_size() <= least + 10_000


class TestWithAnMoE(TrainEngineSuite):
    """The suite's tests with a mixture of experts."""

    architectures = ("qwen3_moe",)

    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings))
