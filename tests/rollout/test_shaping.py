"""Reward shaping and group filters of an algorithm, and weights that stay while others learn."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_testing.fakes import FakeWorkflow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.data import Episode
    from areal_core.ledger.store import Ledger
    from areal_core.rollout.controller import RolloutController

    Build = Callable[..., tuple[RolloutController, Ledger]]
    Audited = Callable[[Path], list[str]]


def test_stages_shape_the_rewards_that_are_trained_on(tmp_path: Path, build: Build, audited: Audited) -> None:
    """One after another, coroutines too; what was generated is counted as it was."""

    async def doubled(episodes: Sequence[Episode]) -> list[Episode]:
        await asyncio.sleep(0)
        return [replace(episode, reward=2 * episode.reward) for episode in episodes]

    def raised(episodes: Sequence[Episode]) -> list[Episode]:
        return [replace(episode, reward=episode.reward + 10) for episode in episodes]

    async def run() -> None:
        plain, _ = build(tmp_path / "plain")
        plain.start()
        wanted, _ = await plain.next_batch(0)
        await plain.close()
        controller, _ = build(tmp_path / "shaped", filters=[doubled, raised])
        controller.start()
        batch, metrics = await controller.next_batch(0)
        await controller.close()
        assert wanted is not None
        assert batch is not None
        assert batch["reward"].tolist() == (2 * wanted["reward"] + 10).tolist()
        assert metrics["reward/all_episodes"] < 10 <= metrics["reward/mean"]

    asyncio.run(asyncio.wait_for(run(), 60))
    assert audited(tmp_path / "shaped") == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda episodes: episodes[:1], r"returned 1 episodes, not 2"),
        (lambda episodes: episodes.clear() or episodes, r"returned 0 episodes, not 2"),
        (lambda episodes: [replace(e, reward=math.nan) for e in episodes], r"reward"),
        (lambda episodes: asyncio.sleep(60), r"TimeoutError"),
    ],
)
def test_a_filter_that_returns_something_wrong_ends_the_run(
    tmp_path: Path, build: Build, broken: Any, words: str
) -> None:
    async def run() -> None:
        controller, _ = build(tmp_path, filters=[broken], episode_timeout_s=2)
        controller.start()
        with pytest.raises(RunError, match=rf"group filters failed on prompt group \d+(?s:.*){words}"):
            await controller.next_batch(0)
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_weights_that_stay_do_not_make_their_tokens_stale(tmp_path: Path, build: Build, audited: Audited) -> None:
    """While a critic warms up nothing is synced: with a bound of 0 the run would stand still."""

    async def run() -> None:
        controller, _ = build(tmp_path, max_staleness=0)
        controller.start()
        for step in range(3):
            batch, metrics = await controller.next_batch(step)
            assert batch is not None
            assert metrics["staleness/max"] == 0
            await controller.skip_sync(step + 1)
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == []


def test_a_group_of_which_nothing_is_left_meets_no_filter(tmp_path: Path, build: Build) -> None:
    """Also where incomplete groups are used: it has failed, and another takes its place."""

    class FailsOnce(FakeWorkflow):
        async def run_episode(self, row: Any, context: Any) -> Any:
            if row["prompt"] == "0":
                raise ValueError("never this one")
            return await super().run_episode(row, context)

    def longest_first(episodes: Sequence[Episode]) -> Sequence[Episode]:
        max(len(episode.trajectories) for episode in episodes)
        return episodes

    async def run() -> None:
        controller, _ = build(tmp_path, FailsOnce(), filters=[longest_first], incomplete_groups="use")
        controller.start()
        for step in range(3):
            batch, _ = await controller.next_batch(step)
            assert batch is not None
            await controller.skip_sync(step + 1)
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))
