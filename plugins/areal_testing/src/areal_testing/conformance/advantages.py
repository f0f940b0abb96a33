"""Conformance suites of advantages, reward shaping and group filters."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_testing.conformance.batches import make_batch, with_passes
from areal_testing.conformance.comparisons import same
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import PackedBatch


LARGEST = 100.0
"""Upper bound of an advantage when rewards are 0 or 1. The advantages that areal includes stay below 10."""


class AdvantageSuite(ComponentSuite):
    """Tests of an advantage. Set `component` (and `settings`), or override `make`.

    Attributes:
        groups_are_independent: True if the rewards of one group do not affect the advantages of other groups. Set False
            if the advantage is normalized over the whole batch.
        counts_episodes: True if an episode counts once, however many trajectories it has. Set False if the advantage is
            computed along an episode's tokens, or if its statistics are over tokens.
        tolerance: largest absolute difference in every comparison.
    """

    kind: ClassVar[str] = "advantages"
    groups_are_independent = True
    counts_episodes = True
    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """Return the batch of most tests, with the columns that the advantage needs. Override it to add other keys."""
        return with_passes(make_batch(), self.needs())

    def of_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """Return the advantage of each token, [T]. A component may return [T] or [B]; [B] is expanded to tokens."""
        actual = self._column(batch)
        if actual.shape == (len(batch),):
            actual = actual[batch.tokens.row_index]
        return actual

    def _column(self, batch: PackedBatch) -> torch.Tensor:
        actual = self.make()(batch)
        column: torch.Tensor = actual["advantages"] if isinstance(actual, Mapping) else actual
        return column

    def test_one_number_for_each_sequence_or_token(self) -> None:
        """The advantage has the shape [B] or [T] and the dtype float32. It is finite and carries no gradients."""
        batch = self.make_batch()
        actual = self._column(batch)
        assert actual.shape in {(len(batch),), (batch.token_count,)}, f"shape {tuple(actual.shape)}"
        assert actual.dtype == torch.float32, f"dtype {actual.dtype}"
        assert not actual.requires_grad, "the advantage carries gradients"
        assert bool(actual.isfinite().all()), "an advantage is not finite"

    def test_groups_are_known_by_their_id(self) -> None:
        """Each sequence gets the same advantage in any order of the sequences."""
        batch = self.make_batch()
        whole = self.of_tokens(batch)
        for seed in range(3):
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
            moved = batch.select(order)
            same(self.of_tokens(moved), whole[moved["place"]], self.tolerance, "the order of sequences matters")

    def test_group_ids_are_only_names(self) -> None:
        """The advantages stay the same if groups get other ids."""
        batch = self.make_batch()
        _, renamed = torch.unique(batch["group_id"], return_inverse=True)
        other = batch.with_sequences(group_id=77 - 5 * renamed)
        same(self.of_tokens(other), self.of_tokens(batch), self.tolerance, "the numbers of groups matter")

    def test_groups_are_independent(self) -> None:
        """Other rewards in one group do not change the advantages of the other groups."""
        if not self.groups_are_independent:
            return
        batch = self.make_batch()
        in_first = batch["group_id"] == batch["group_id"][0]
        raised = batch.with_sequences(reward=torch.where(in_first, batch["reward"] * 3 + 5, batch["reward"]))
        others = ~in_first[batch.tokens.row_index]
        same(
            self.of_tokens(raised)[others], self.of_tokens(batch)[others], self.tolerance, "groups influence each other"
        )

    def test_an_episode_counts_once(self) -> None:
        """Each trajectory of an episode gets the advantage that the episode's only trajectory would get."""
        if not self.counts_episodes:
            return
        batch = self.make_batch()
        order = [*range(len(batch)), 2, 2]
        doubled = batch.select(order)
        actual = self.of_tokens(doubled)
        same(
            actual,
            self.of_tokens(batch)[doubled["place"]],
            self.tolerance,
            "an episode of three trajectories counts more",
        )

    def test_one_outlier_keeps_advantages_bounded(self) -> None:
        """The advantage stays bounded if all rewards of a group but one are equal.

        This is common if answers are right or wrong. A robust measure of spread, such as the median deviation, is 0
        then, and a division by it would ruin the policy.
        """
        batch = self.make_batch()
        for rewards in ((0.0, 1.0), (1.0, 0.0)):
            first = torch.zeros(len(batch), dtype=torch.bool)
            for group in torch.unique(batch["group_id"]):
                first[(batch["group_id"] == group).nonzero()[0]] = True
            others, outlier = rewards
            actual = self.of_tokens(batch.with_sequences(reward=torch.where(first, outlier, others)))
            largest = float(actual.abs().max())
            assert largest <= LARGEST, (
                f"an advantage is {largest:g} if one reward of each group is {outlier:g} and the others are {others:g}"
            )

    def test_equal_rewards_are_finite(self) -> None:
        """The advantages are finite if all rewards of a group are equal, so that their spread is 0."""
        batch = self.make_batch()
        for value in (0.0, 0.1, 1e6):
            actual = self.of_tokens(batch.with_sequences(reward=torch.full((len(batch),), value)))
            assert bool(actual.isfinite().all()), f"rewards that all are {value} give {actual[:3].tolist()}"

    def test_the_batch_stays_as_it_was(self) -> None:
        """The advantage does not write into the batch's tensors."""
        batch = self.make_batch()
        before = batch.to_bytes()
        self.make()(batch)
        assert batch.to_bytes() == before, "the advantage changed the batch in place"


class GroupFilterSuite(ComponentSuite):
    """Tests of a group filter. Set `component` (and `settings`), or override `make`.

    Attributes:
        examples: pairs of the rewards of a group and the expected result: its rewards afterwards, or None if the filter
            drops the group.
    """

    kind: ClassVar[str] = "group_filters"
    examples: ClassVar[Sequence[tuple[Sequence[float], Sequence[float] | None]]] = ()

    def run(self, episodes: Sequence[Episode]) -> Sequence[Episode] | None:
        """Return the episodes that the filter keeps of a group, or None if it drops the group."""
        actual = self.make()(episodes)
        if inspect.isawaitable(actual):

            async def wait() -> Sequence[Episode] | None:
                return await actual

            actual = asyncio.run(wait())
        return actual

    def test_examples(self) -> None:
        """Each of `examples` has its expected result."""
        assert self.examples, "the suite has no examples: set `examples`"
        for rewards, expected in self.examples:
            result = self.run(make_episodes(rewards))
            assert (result is None) == (expected is None), f"rewards {list(rewards)}: dropped is {result is None}"
            if result is not None and expected is not None:
                shaped = [episode.reward for episode in result]
                assert shaped == list(expected), f"rewards {list(rewards)} become {shaped}, not {list(expected)}"

    def test_a_group_stays_a_group(self) -> None:
        """The filter keeps the episodes' number, order and tokens, changes none in place, and gives finite rewards."""
        for rewards in ([0.0], [1.0, 1.0], [0.0, 1.0, 0.5], [-1e6, 1e6], [0.1] * 64):
            episodes = make_episodes(rewards)
            result = self.run(episodes)
            assert [episode.reward for episode in episodes] == list(rewards), "the filter changed the episodes in place"
            if result is None:
                continue
            assert len(result) == len(episodes), f"{len(result)} episodes for {len(episodes)}"
            for before, after in zip(episodes, result, strict=True):
                assert math.isfinite(after.reward), f"a reward of {after.reward}"
                are_equal = np.array_equal(
                    before.trajectories[0].tokens["input_ids"], after.trajectories[0].tokens["input_ids"]
                )
                assert are_equal, "the order of the episodes, or their tokens, changed"

    def test_the_order_of_siblings_does_not_matter(self) -> None:
        """The result does not depend on the order of the episodes, or on groups that the filter saw before."""
        draw = random.Random(1)
        for _ in range(20):
            rewards = [draw.choice([0.0, 0.5, 1.0]) for _ in range(5)]
            order = draw.sample(range(5), 5)
            episodes = make_episodes(rewards)
            result, moved = self.run(episodes), self.run([episodes[i] for i in order])
            assert (result is None) == (moved is None), f"{rewards} in another order is judged differently"
            if result is not None and moved is not None:
                assert [result[i].reward for i in order] == [episode.reward for episode in moved], f"{rewards}: {order}"


def make_episodes(rewards: Sequence[float]) -> list[Episode]:
    """Return episodes of one prompt with answers of 1, 2, 3, ... tokens and these rewards."""
    return [
        Episode(
            [
                Trajectory.from_generation(
                    [1, 2], Generation([3 + i] * (i + 1), [-0.5] * (i + 1), [0] * (i + 1), FinishReason.STOP)
                )
            ],
            reward,
        )
        for i, reward in enumerate(rewards)
    ]


class RewardShapingSuite(GroupFilterSuite):
    """Tests of reward shaping: those of `GroupFilterSuite`, and that no group is dropped."""

    kind: ClassVar[str] = "reward_shaping"

    def run(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Return the group's episodes with their new rewards."""
        result = super().run(episodes)
        assert result is not None, (
            "reward shaping returned None, which drops the group: register the component as a group filter"
        )
        return result
