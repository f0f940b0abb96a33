"""What a workflow asks for and leaves, as the engine and the records of a run can take it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from areal_core.data import Episode, Trajectory
from areal_core.messages.workflows import RunGroup
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.servers import SamplingParameters
from areal_testing.fakes import FakeEngine, FakeTokenizer, FakeWorkflow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.sdk import WorkflowContext


class CutShort(FakeWorkflow):
    """Has room for three tokens, and a text of its own that no UTF-8 can write."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        generation = await context.generate([1, 2], max_new_tokens=3)
        return Episode([Trajectory.from_generation([1, 2], generation)], 1.0, text="half \ud83d")


def test_fewer_tokens_than_the_least_are_asked_for_where_there_is_no_room_and_half_a_character_is_written() -> None:
    async def run() -> None:
        engine = FakeEngine()
        runner = EpisodeRunner(CutShort(), engine, RewardSum([]), FakeTokenizer())
        sampling = SamplingParameters(max_new_tokens=20, min_new_tokens=8)
        episode = await runner.run({"prompt": "x"}, RunGroup(0, 0, 0, (0,), sampling), 0)
        assert episode.text.encode()
        (asked,) = engine.requests
        asked.sampling.check()
        assert (asked.sampling.max_new_tokens, asked.sampling.min_new_tokens) == (3, 3)

    asyncio.run(run())
