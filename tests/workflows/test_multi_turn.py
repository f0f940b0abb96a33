"""What the turns of a conversation have earned."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areal_core.data import FinishReason, Generation
from areal_core.sdk import RowError, StepResult
from areal_core.workflows.multi_turn import MultiTurn
from areal_core.workflows.settings import MultiTurnSettings
from areal_testing.fakes import FakeTokenizer


class World:
    """Pays 1, 2, 4 for the turns and ends after the third."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, row: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "begin"}]

    async def step(self, completion: str) -> StepResult:
        self.turns += 1
        reward = 2.0 ** (self.turns - 1)
        return StepResult(reward=reward, terminated=True) if self.turns == 3 else StepResult("more", reward)


class ChatTokenizer(FakeTokenizer):
    """Writes each message behind its role."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return text + "<assistant>" * add_generation_prompt


@pytest.mark.parametrize(("discount", "wanted"), [(1.0, [1.0, 2.0, 4.0]), (0.5, [1.0, 1.0, 1.0])])
def test_each_turn_knows_what_it_has_earned(discount: float, wanted: list[float]) -> None:
    async def generate(input_ids: list[int], **options: Any) -> Generation:
        return Generation([111, 107], [-1.0, -1.0], [1, 1], FinishReason.STOP)

    settings = {"environment": f"{__file__}:World", "turn_discount": discount}
    workflow = MultiTurn(MultiTurnSettings.model_validate(settings))
    context: Any = SimpleNamespace(tokenizer=ChatTokenizer(), generate=generate, end_ids=frozenset())
    episode = asyncio.run(workflow.run_episode({}, context))
    (trajectory,) = episode.trajectories
    assert trajectory.turns["turn_rewards"].tolist() == wanted
    assert episode.reward == sum(wanted)
    assert np.unique(trajectory.tokens["turn_ids"]).tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({}, FinishReason.STOP), ({"max_turns": 2}, FinishReason.LENGTH), ({"max_tokens": 30}, FinishReason.LENGTH)],
)
def test_a_conversation_that_a_limit_ends_is_cut(limits: dict[str, int], reason: FinishReason) -> None:
    """Whatever ended its last turn: `mask_truncated` and the share of truncated answers go by it."""

    async def generate(input_ids: list[int], **options: Any) -> Generation:
        return Generation([111, 107], [-1.0, -1.0], [1, 1], FinishReason.STOP)

    workflow = MultiTurn(MultiTurnSettings.model_validate({"environment": f"{__file__}:World", **limits}))
    context: Any = SimpleNamespace(tokenizer=ChatTokenizer(), generate=generate, end_ids=frozenset())
    (trajectory,) = asyncio.run(workflow.run_episode({}, context)).trajectories
    assert int(trajectory.sequence["finish_reason"]) == reason


def test_an_opening_that_is_too_long_fails_and_is_no_reward_of_0() -> None:
    workflow = MultiTurn(MultiTurnSettings.model_validate({"environment": f"{__file__}:World", "max_tokens": 3}))
    context: Any = SimpleNamespace(tokenizer=ChatTokenizer(), generate=None, end_ids=frozenset())
    with pytest.raises(RowError, match=r"the opening has \d+ tokens, and workflow.max_tokens is 3"):
        asyncio.run(workflow.run_episode({}, context))


class Calculator(World):
    """Answers with results of tools, counts them, and has a limit of two steps."""

    async def step(self, completion: str) -> StepResult:
        self.turns += 1
        results = [{"role": "tool", "content": f"result {self.turns}"}, {"role": "user", "content": "go on"}]
        return StepResult(results, 0.5, truncated=self.turns == 2, info={"tool_calls": 1, "tries": self.turns})


class OfBefore(World):
    """Returns pairs."""

    async def step(self, completion: str) -> tuple[str | None, float]:
        self.turns += 1
        return (None if self.turns == 3 else "" if self.turns == 2 else "more"), 2.0 ** (self.turns - 1)


class Mute(World):
    """Goes on and says nothing."""

    async def step(self, completion: str) -> StepResult:
        return StepResult()


class Roleless(World):
    """Returns what is no message."""

    async def step(self, completion: str) -> StepResult:
        return StepResult([{"content": "more"}])


class Swapped(World):
    """Returns the old pair the other way round."""

    async def step(self, completion: str) -> Any:
        return 1.0, "again"


class Graded(World):
    """Has a reward that is no number."""

    async def step(self, completion: str) -> StepResult:
        return StepResult("more", "good")  # type: ignore[arg-type]


class Worded(World):
    """Has a text among the numbers."""

    async def step(self, completion: str) -> StepResult:
        return StepResult("more", info={"hint": "lower"})  # type: ignore[dict-item]


class Plain(World):
    """Is no coroutine."""

    def step(self, completion: str) -> StepResult:  # type: ignore[override]
        return StepResult("more")


def run(environment: str) -> Any:
    """Run one episode in an environment of this file."""

    async def generate(input_ids: list[int], **options: Any) -> Generation:
        return Generation([111, 107], [-1.0, -1.0], [1, 1], FinishReason.STOP)

    workflow = MultiTurn(MultiTurnSettings.model_validate({"environment": f"{__file__}:{environment}"}))
    context: Any = SimpleNamespace(tokenizer=ChatTokenizer(), generate=generate, end_ids=frozenset())
    return asyncio.run(workflow.run_episode({}, context))


def test_observations_may_be_messages_and_a_truncated_episode_is_cut() -> None:
    episode = run("Calculator")
    (trajectory,) = episode.trajectories
    assert "<tool>result 1\n<user>go on\n<assistant>" in episode.text
    assert "result 2" not in episode.text, "nobody reads it"
    assert int(trajectory.sequence["finish_reason"]) == FinishReason.LENGTH
    assert trajectory.turns["turn_rewards"].tolist() == [0.5, 0.5]
    assert episode.metrics == {"tool_calls": 2, "tries": 3}


def test_a_pair_works_for_one_more_version() -> None:
    with pytest.warns(FutureWarning, match="step of OfBefore returns a pair"):
        episode = run("OfBefore")
    assert episode.reward == 7
    assert int(episode.trajectories[0].sequence["finish_reason"]) == FinishReason.STOP


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ("Mute", "step of Mute returned no observation, and neither"),
        ("Roleless", "has no role"),
        ("Graded", "reward in the StepResult of Graded is 'good', and must be a number"),
        ("Worded", "hint in the StepResult of Worded is 'lower', and must be a number"),
        ("Plain", "Plain.step is no coroutine: write async def step"),
    ],
)
def test_a_wrong_result_fails_the_episode(environment: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        run(environment)


def test_a_pair_the_wrong_way_round_is_refused() -> None:
    words = r"the observation of Swapped is 1\.0: return a text or a list of messages"
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match=words):
        run("Swapped")


def test_rewards_that_no_turn_calls_are_noted() -> None:
    rewards = [SimpleNamespace(target="rewards/exact_match")]
    settings = MultiTurnSettings.model_validate({"environment": f"{__file__}:World"})
    config: Any = SimpleNamespace(rewards=rewards)
    assert list(settings.notes(config)) == [
        "multi_turn does not call rewards/exact_match: the environment gives the rewards; set rewards: []"
    ]
    config.rewards = []
    assert list(settings.notes(config)) == []


class Tensors(World):
    """Returns scalars of NumPy and PyTorch, as many games do."""

    async def step(self, completion: str) -> Any:
        self.turns += 1
        return StepResult(None, torch.tensor(0.5), terminated=True, info={"tries": np.float32(2)})  # type: ignore


def test_a_reward_may_be_a_scalar_of_a_library() -> None:
    episode = run("Tensors")
    assert float(episode.reward) == 0.5
    assert episode.metrics == {"tries": 2}
