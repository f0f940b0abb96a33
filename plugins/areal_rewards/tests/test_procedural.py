import functools
import json

import pytest
from pydantic import ValidationError

from areal_core.errors import ConfigError
from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward

pytest.importorskip("reasoning_gym")

from areal_rewards.config import ReasoningGymSettings, TaskScoreSettings
from areal_rewards.procedural import ReasoningGymDataset, _problems, score_task

pytestmark = pytest.mark.slow


def make(task="basic_arithmetic", **settings):
    return ReasoningGymDataset(ReasoningGymSettings(task=task, **settings))


def received(row):
    """The row as it arrives in the process that computes rewards."""
    _problems.cache_clear()
    return json.loads(json.dumps(row))


def test_rows_are_the_librarys_problems():
    import reasoning_gym

    rows = make(size=5, seed=3, settings={"min_terms": 2, "max_terms": 2})
    own = reasoning_gym.create_dataset("basic_arithmetic", size=5, seed=30_000_000, min_terms=2, max_terms=2)
    assert [rows[i]["prompt"] for i in range(len(rows))] == [problem["question"] for problem in own]
    assert [rows[i]["answer"] for i in range(len(rows))] == [problem["answer"] for problem in own]
    assert rows[4] == rows[4] != rows[3]
    assert rows[0]["metadata"]["num_terms"] == 2
    with pytest.raises(IndexError, match="row 5 of 5"):
        rows[5]


def test_another_seed_has_other_problems():
    """The library's own seeds 0 and 1 share 49 of 50."""
    one, other = make(size=50, seed=0), make(size=50, seed=1)
    assert len({one[i]["prompt"] for i in range(50)} & {other[i]["prompt"] for i in range(50)}) < 10


@pytest.mark.parametrize("task", ["basic_arithmetic", "chain_sum", "decimal_arithmetic", "countdown", "rearc"])
def test_the_tasks_own_scorer_judges_after_transport(task):
    """The grids of `rearc` are tuples: scored from transported metadata, the right answer would get 0.05."""
    row = received(make(task, size=3, seed=1)[2])
    answer = row["answer"] if task != "countdown" else row["metadata"]["expression"]
    assert score_task(answer, row["task"], answer_tag=None) == 1
    assert score_task("nonsense", row["task"], answer_tag=None) < 0.1


def test_an_answer_in_a_tag():
    row = received(make(size=1)[0])
    reward = functools.partial(score_task, answer_tag="answer")
    assert reward(f"I think <answer>1</answer>, no: <answer> {row['answer']}\n</answer>", row["task"]) == 1
    assert reward(row["answer"], row["task"]) == 0
    with pytest.raises(ValidationError):
        TaskScoreSettings(answer_tag="<answer>")


def test_the_runtime_finds_the_task_in_the_row():
    rewards = RewardSum([WeightedReward("score", functools.partial(score_task, answer_tag=None))])
    row = received(make(size=1)[0])
    assert rewards({"completion": row["answer"], "row": row}).value == 1
    with pytest.raises(RewardError, match="has a parameter 'task'"):
        rewards({"completion": "1", "row": {"prompt": "1"}})


def test_mistakes_are_named(without):
    with pytest.raises(ConfigError, match=r"reasoning-gym has no task 'arithmetic'; it has: .*basic_arithmetic"):
        make("arithmetic")
    with pytest.raises(ConfigError, match=r"'basic_arithmetic' of reasoning-gym rejects its settings: .*max_term'"):
        make(settings={"max_term": 3})
    with pytest.raises(ConfigError, match="rejects its settings: min_terms must be positive"):
        make(settings={"min_terms": -3})
    _problems.cache_clear()
    without("reasoning_gym")
    with pytest.raises(ConfigError, match=r"not installed: pip install './plugins/areal_rewards\[reasoning-gym\]'"):
        make()
