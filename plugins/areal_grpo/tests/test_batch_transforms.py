"""Stages against loops over tokens and episodes, and against lm-human-preferences' controller, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.algorithms.composition import PolicyGradient
from areal_core.config.context import ResolutionContext
from areal_core.config.sections import TrainingSection
from areal_core.plugins import PluginManager
from areal_core.training.context import BatchContext
from areal_core.training.state import TrainerState
from areal_grpo.batch_transforms import kl_in_reward, reward_scaling
from areal_grpo.config import GRPOSettings
from areal_testing.conformance import make_batch, numbers_of
from areal_testing.conformance.batches import ACTOR_OUTPUT, REFERENCE_OUTPUT

FIXED = {"coefficient": 0.1, "target": None, "horizon": 1}


def context(state=None):
    return BatchContext(TrainingSection(), {}, state={} if state is None else state)


def with_policies(seed=0, distance=0.5):
    batch = make_batch(seed=seed)
    draw = torch.Generator().manual_seed(seed + 10)
    near = batch["logprobs"].double() + distance * torch.randn(batch.token_count, generator=draw, dtype=torch.float64)
    return batch.with_tokens(proximal_logprobs=batch["logprobs"].double(), reference_logprobs=near)


def token_kl(batch):
    """By token in the loss: log π_prox - log reference."""
    return {
        t: float(batch["proximal_logprobs"][t]) - float(batch["reference_logprobs"][t])
        for t in range(batch.token_count)
        if bool(batch["loss_mask"][t])
    }


def test_the_penalty_of_each_token():
    batch, offered = with_policies(), context()
    found = kl_in_reward(batch, offered, **FIXED)["token_rewards"]
    divergence = token_kl(batch)
    wanted = [-0.1 * divergence.get(t, 0.0) for t in range(batch.token_count)]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-10)
    numbers = numbers_of(offered.metrics)
    assert numbers["reward_kl"] == pytest.approx(sum(divergence.values()) / len(divergence))
    assert numbers["reward_kl_episode"] == pytest.approx(sum(divergence.values()) / len(batch))
    assert numbers["reward_kl_coefficient"] == pytest.approx(0.1)
    assert offered.state == {}


def test_it_is_added_to_what_tokens_have_earned_before():
    batch = with_policies()
    alone = kl_in_reward(batch, context(), **FIXED)["token_rewards"]
    before = torch.randn(batch.token_count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    both = kl_in_reward(batch.with_tokens(token_rewards=before), context(), **FIXED)["token_rewards"]
    torch.testing.assert_close(both, torch.where(batch["loss_mask"], before + alone, 0.0), rtol=0, atol=1e-12)


def test_what_stands_outside_the_mask_does_not_matter():
    batch = with_policies()
    wild = torch.where(batch["loss_mask"], batch["reference_logprobs"], -math.inf)
    batch = batch.with_tokens(token_rewards=torch.zeros(batch.token_count, dtype=torch.float64))
    wanted = kl_in_reward(batch, context(), **FIXED)["token_rewards"]
    found = kl_in_reward(batch.with_tokens(reference_logprobs=wild), context(), **FIXED)["token_rewards"]
    assert torch.equal(found, wanted)


def test_float32_stays_float32():
    batch = with_policies()
    single = batch.with_tokens(**{key: batch[key].float() for key in ("proximal_logprobs", "reference_logprobs")})
    found = kl_in_reward(single, context(), **FIXED)["token_rewards"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), kl_in_reward(batch, context(), **FIXED)["token_rewards"], atol=1e-5, rtol=0
    )


def controller(kls, target, beginning, horizon, episodes):
    """AdaptiveKLController of lm-human-preferences and TRL, with a plain number for the clip."""
    value, used = beginning, []
    for current in kls:
        used.append(value)
        error = max(min(current / target - 1, 0.2), -0.2)
        value *= 1 + error * episodes / horizon
    return used, value


@given(distances=st.lists(st.floats(0, 3), min_size=1, max_size=6), target=st.floats(0.5, 20))
def test_the_coefficient_follows_the_target(distances, target):
    state, used, kls = {}, [], []
    for seed, distance in enumerate(distances):
        batch, offered = with_policies(seed, distance), context(state)
        found = kl_in_reward(batch, offered, coefficient=0.2, target=target, horizon=100)["token_rewards"]
        divergence = token_kl(batch)
        kls.append(sum(divergence.values()) / len(batch))
        used.append(numbers_of(offered.metrics)["reward_kl_coefficient"])
        for t, each in divergence.items():
            assert float(found[t]) == pytest.approx(-used[-1] * each, rel=1e-10, abs=1e-10)
    wanted, last = controller(kls, target, 0.2, 100, len(batch))
    assert used == pytest.approx(wanted, rel=1e-10)
    assert float(state["kl_in_reward/coefficient"]) == pytest.approx(last, rel=1e-10)


def test_a_resume_goes_on_with_the_same_coefficient(tmp_path):
    """The state is what a checkpoint writes: tensors by name."""
    from safetensors.torch import load_file, save_file

    adaptive = {"coefficient": 0.2, "target": 1.0, "horizon": 100}
    state = TrainerState().algorithm
    kl_in_reward(with_policies(1), context(state), **adaptive)
    save_file(state, tmp_path / "state")
    resumed = load_file(tmp_path / "state")
    found = [kl_in_reward(with_policies(2), context(s), **adaptive)["token_rewards"] for s in (state, resumed)]
    assert torch.equal(*found)
    assert float(resumed["kl_in_reward/coefficient"]) != 0.2


def test_an_episode_of_several_trajectories_counts_once():
    batch = with_policies()
    rows = list(range(len(batch)))
    parts = batch.with_sequences(episode_id=torch.tensor([row // 2 for row in rows]))
    offered = context()
    kl_in_reward(parts, offered, **FIXED)
    wanted = sum(token_kl(batch).values()) / (len(batch) // 2)
    assert numbers_of(offered.metrics)["reward_kl_episode"] == pytest.approx(wanted)


@pytest.mark.parametrize("proximal", ["recomputed", "behavior"])
def test_the_pass_that_it_asks_for_leaves_the_choice_of_the_proximal_policy(proximal):
    """With `proximal: behavior` ratios start from the policy that sampled, whatever column a stage has asked for."""
    parts = {"batch_transforms": ["grpo/kl_in_reward"], "corrections": [], "proximal": proximal}
    manager = ResolutionContext(PluginManager.load(["grpo"]))
    algorithm = PolicyGradient(GRPOSettings.model_validate(parts, context=manager))
    batch = make_batch()

    class Engine:
        def __init__(self, key):
            self._key = key

        def forward(self, batch, outputs):
            return {"logprobs": batch[self._key]}

    engines = {"actor": Engine(ACTOR_OUTPUT), "reference": Engine(REFERENCE_OUTPUT)}
    offered = BatchContext(TrainingSection(num_epochs=2), engines)
    ((work, *_), *_) = algorithm.updates(algorithm.prepare(batch, offered), offered)
    assert "token_rewards" in work.batch
    logprobs = batch["logprobs"] if proximal == "behavior" else batch[ACTOR_OUTPUT]
    found = numbers_of(work.loss(work.batch, {"logprobs": logprobs}).metrics)
    assert found["ratio"] == pytest.approx(1.0)


@given(
    reward=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=6),
    shift=st.floats(-2, 2),
    scale=st.floats(0.1, 3),
    clip=st.none() | st.floats(0.1, 5),
)
def test_scaling(reward, shift, scale, clip):
    batch = make_batch().select(list(range(len(reward))))
    batch = batch.with_sequences(reward=torch.tensor(reward, dtype=torch.float64))
    found = reward_scaling(batch, context(), shift=shift, scale=scale, clip=clip)["reward"]
    wanted = [(each + shift) * scale for each in reward]
    if clip is not None:
        wanted = [max(min(each, clip), -clip) for each in wanted]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    assert found.dtype == torch.float64
