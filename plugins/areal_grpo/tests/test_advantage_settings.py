"""What the settings of advantages, transforms and auxiliary losses bring into a run, and which mistakes they find."""

import pytest

from areal_core.config.needs import needs_of, roles_of
from areal_core.errors import ConfigError
from areal_core.sdk import ForwardPass


def passes(config, updates=1):
    return {need.column for need in needs_of(config.algorithm, updates) if isinstance(need, ForwardPass)}


def test_a_critic_comes_with_what_asks_it(read):
    config = read("algorithm.advantage=gae", "algorithm.auxiliary_losses=[value_regression]")
    assert list(roles_of(config.algorithm, 1)) == ["actor", "critic"]
    assert roles_of(config.algorithm, 1)["critic"].trains
    assert passes(config) == {"values"}
    assert list(config.cross_notes()) == []


def test_a_critic_that_nothing_teaches_is_told(read):
    (note,) = read("algorithm.advantage=gae").cross_notes()
    message = "algorithm.advantage: gae uses a critic, but nothing trains it: choose an auxiliary loss such as "
    assert note == f"{message}value_regression"


def test_a_penalty_in_the_reward_brings_the_reference_and_both_passes(read):
    config = read("algorithm.batch_transforms=[kl_in_reward]")
    assert list(roles_of(config.algorithm, 1)) == ["actor", "reference"]
    assert passes(config) == {"proximal_logprobs", "reference_logprobs"}


@pytest.mark.parametrize("advantage", ["lite_ppo", "max_rl", "pass_at_k", "gdpo", "reinforce_pp_baseline"])
def test_what_compares_answers_refuses_groups_of_one(advantage, read):
    with pytest.raises(ConfigError, match=r"rollout.group_size is 1"):
        read(f"algorithm.advantage={advantage}", "rollout.group_size=1")


def test_the_best_of_more_answers_than_a_group_has_is_refused(read):
    best_of_8 = "algorithm.advantage={type: pass_at_k, k: 8}"
    with pytest.raises(ConfigError, match=r"set rollout.group_size to 8 or more, or lower advantage\.k"):
        read(best_of_8, "rollout.group_size=4")
    assert read(best_of_8, "rollout.group_size=8").algorithm.settings.advantage.settings.k == 8


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp"])
def test_what_compares_nothing_takes_them(advantage, read):
    assert read(f"algorithm.advantage={advantage}", "rollout.group_size=1").rollout.group_size == 1


def test_weights_that_gdpo_does_not_see_are_told(read):
    rewards = "rewards=[{type: 'parts.py:score', weight: 0.5}]"
    (note,) = read("algorithm.advantage=gdpo", rewards).cross_notes()
    assert "gdpo normalizes each reward and uses advantage.weights" in note
    assert list(read("algorithm.advantage=gdpo", "rewards=['parts.py:score']").cross_notes()) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.reward_shaping=[overlong_penalty]", "max_length: is required"),
        ("algorithm.reward_shaping=[{type: overlong_penalty, max_length: 4, buffer: 5}]", "at most max_length"),
        ("algorithm.reward_shaping=[reward_bounds]", "low or high must be set"),
        ("algorithm.reward_shaping=[{type: reward_bounds, low: 1, high: 0}]", "low must be below high"),
        ("algorithm.batch_transforms=[{type: kl_in_reward, target: 0}]", "target"),
        ("algorithm.advantage={type: gae, level: episode}", "level"),
        ("algorithm.auxiliary_losses=[{type: value_regression, clip: 0}]", "clip"),
    ],
)
def test_settings_that_mean_nothing_are_refused(override, message, read):
    with pytest.raises(ConfigError, match=message):
        read(override)


def test_lengths_are_not_compared_in_a_group_of_one(read):
    alone = ("algorithm.advantage=reinforce_pp", "rollout.group_size=1")
    with pytest.raises(ConfigError, match="length_penalty compares the answers to one prompt"):
        read(*alone, "algorithm.reward_shaping=[length_penalty]")


def test_a_penalty_that_is_never_due_is_told(read):
    penalty = "algorithm.reward_shaping=[{type: overlong_penalty, max_length: 100, buffer: 20}]"
    (note,) = read(penalty, "sampling.max_new_tokens=80").cross_notes()
    assert "with one turn it never applies" in note
    assert list(read(penalty, "sampling.max_new_tokens=81").cross_notes()) == []
