"""What the turns of a conversation have earned."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_core.data import FinishReason, Generation
from areal_core.testing.fakes import FakeTokenizer
from areal_core.workflows.multi_turn import MultiTurn
from areal_core.workflows.settings import MultiTurnSettings


class World:
    """Pays 1, 2, 4 for the turns and ends after the third."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, row: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "begin"}]

    async def step(self, completion: str) -> tuple[str | None, float]:
        self.turns += 1
        return (None if self.turns == 3 else "more"), 2.0 ** (self.turns - 1)


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
    context: Any = SimpleNamespace(tokenizer=ChatTokenizer(), generate=generate)
    episode = asyncio.run(workflow.run_episode({}, context))
    (trajectory,) = episode.trajectories
    assert trajectory.turns["turn_rewards"].tolist() == wanted
    assert episode.reward == sum(wanted)
    assert np.unique(trajectory.tokens["turn_ids"]).tolist() == [-1, 0, 1, 2]
