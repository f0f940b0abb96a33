"""A reward may abstain, and an answer whose reward fails may be scored."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from areal_core.data import FinishReason
from areal_core.data.packing import pack_group
from areal_core.data.trajectory import Episode, Generation, Trajectory
from areal_core.interfaces.inference import SamplingParameters
from areal_core.messages.workflows import RunGroup
from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward
from areal_core.rollout.episodes import EpisodeError, EpisodeRunner
from areal_core.workflows.settings import SingleTurnSettings
from areal_core.workflows.single_turn import SingleTurn
from areal_testing.fakes import FakeEngine, FakeTokenizer


def code_only(task: str) -> float | None:
    return 1.0 if task == "code" else None


def length(completion: str) -> float:
    return len(completion) / 10


def hangs() -> float:
    raise ValueError("the verifier crashed")


BOTH = [WeightedReward("code", code_only, 2.0), WeightedReward("length", length)]


def test_none_counts_neither_in_the_sum_nor_as_a_component():
    assert RewardSum(BOTH)({"completion": "four", "row": {"task": "code"}}).value == 2.4
    score = RewardSum(BOTH)({"completion": "four", "row": {"task": "sums"}})
    assert (score.value, dict(score.components)) == (0.4, {"length": 0.4})
    with pytest.raises(RewardError, match="every reward returned None for this answer"):
        RewardSum(BOTH[:1])({"row": {"task": "sums"}})


def test_an_episode_that_a_reward_did_not_judge_is_nan_in_its_column():
    generation = Generation([5], [-1.0], [0], FinishReason.STOP)
    episodes = {
        n: Episode([Trajectory.from_generation([1], generation)], 1.0, rewards)
        for n, rewards in ((0, {"a": 1.0}), (1, {}))
    }
    column = pack_group(0, (0, 0), 2, episodes)["sequences.reward.a"]
    assert column[0] == 1.0
    assert math.isnan(column[1])


@pytest.mark.parametrize("failed_reward", [None, -0.5])
def test_an_answer_whose_reward_fails_is_scored_where_the_config_says_so(failed_reward):
    told: list[str] = []
    runner = EpisodeRunner(
        SingleTurn(SingleTurnSettings()),
        FakeEngine(),
        RewardSum([WeightedReward("hangs", hangs)]),
        FakeTokenizer(),
        failed_reward=failed_reward,
        on_failure=lambda *event: told.append(event[-1]),
    )
    task: Any = RunGroup(0, 0, 0, (0,), SamplingParameters())
    if failed_reward is None:
        with pytest.raises(EpisodeError, match="reward 'hangs' raised ValueError: the verifier crashed"):
            asyncio.run(runner.run({"prompt": "a"}, task, 0))
        assert "failed" not in runner.pop_metrics()
        return
    episode = asyncio.run(runner.run({"prompt": "a"}, task, 0))
    assert (episode.reward, episode.rewards) == (-0.5, {})
    assert runner.pop_metrics() == {"failed": 1.0}
    assert told[0].startswith("scored -0.5: reward 'hangs' raised")
