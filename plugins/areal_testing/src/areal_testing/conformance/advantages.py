"""What advantages, reward shaping and group filters must do."""

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
"""Of rewards that are 0 or 1; what comes with areal stays below 10."""


class AdvantageSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        groups_are_independent: whether the rewards of one group leave the advantages of the others as they are; an
            advantage that is normalized over the whole batch sets False.
        counts_episodes: whether an episode counts once, however many trajectories it left; an advantage that is
            computed along an episode's tokens, or whose statistics are over tokens, sets False.
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "advantages"
    groups_are_independent = True
    counts_episodes = True
    tolerance = 1e-5

    def make_batch(self) -> PackedBatch:
        """The batch of most tests, with the columns that the advantage needs; override this to add other keys."""
        return with_passes(make_batch(), self.needs())

    def of_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """The advantage of each token, [T], in the two forms in which it may be given."""
        found = self._column(batch)
        if found.shape == (len(batch),):
            found = found[batch.tokens.row_index]
        return found

    def _column(self, batch: PackedBatch) -> torch.Tensor:
        found = self.make()(batch)
        column: torch.Tensor = found["advantages"] if isinstance(found, Mapping) else found
        return column

    def test_one_number_for_each_sequence_or_token(self) -> None:
        """[B] or [T], float32, finite, and without gradients: a number, not a function of the policy."""
        batch = self.make_batch()
        found = self._column(batch)
        assert found.shape in {(len(batch),), (batch.token_count,)}, f"shape {tuple(found.shape)}"
        assert found.dtype == torch.float32, f"dtype {found.dtype}"
        assert not found.requires_grad, "the advantage carries gradients"
        assert bool(found.isfinite().all()), "an advantage is not finite"

    def test_groups_are_known_by_their_id(self) -> None:
        """Any order of the sequences gives every sequence the same advantage."""
        batch = self.make_batch()
        whole = self.of_tokens(batch)
        for seed in range(3):
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
            moved = batch.select(order)
            same(self.of_tokens(moved), whole[moved["place"]], self.tolerance, "the order of sequences matters")

    def test_group_ids_are_only_names(self) -> None:
        """Other ids for the same groups change nothing."""
        batch = self.make_batch()
        _, renamed = torch.unique(batch["group_id"], return_inverse=True)
        other = batch.with_sequences(group_id=77 - 5 * renamed)
        same(self.of_tokens(other), self.of_tokens(batch), self.tolerance, "the numbers of groups matter")

    def test_groups_are_compared_with_themselves_alone(self) -> None:
        """Other rewards in one group leave the other groups' advantages as they are."""
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
        """However many trajectories it left: each of them gets what the episode's only one would get."""
        if not self.counts_episodes:
            return
        batch = self.make_batch()
        order = [*range(len(batch)), 2, 2]
        doubled = batch.select(order)
        found = self.of_tokens(doubled)
        same(
            found,
            self.of_tokens(batch)[doubled["place"]],
            self.tolerance,
            "an episode of three trajectories counts more",
        )

    def test_one_that_differs_is_no_catastrophe(self) -> None:
        """Where all rewards of a group but one are equal, as with answers that are right or wrong, a measure of their
        spread may be 0 though they differ: what is divided by it must not take the policy apart."""
        batch = self.make_batch()
        for rewards in ((0.0, 1.0), (1.0, 0.0)):
            first = torch.zeros(len(batch), dtype=torch.bool)
            for group in torch.unique(batch["group_id"]):
                first[(batch["group_id"] == group).nonzero()[0]] = True
            others, one = rewards
            found = self.of_tokens(batch.with_sequences(reward=torch.where(first, one, others)))
            largest = float(found.abs().max())
            assert largest <= LARGEST, (
                f"an advantage is {largest:g} where one reward of each group is {one:g} and the others are {others:g}"
            )

    def test_equal_rewards_are_finite(self) -> None:
        """A group of equal rewards has no spread to divide by."""
        batch = self.make_batch()
        for value in (0.0, 0.1, 1e6):
            found = self.of_tokens(batch.with_sequences(reward=torch.full((len(batch),), value)))
            assert bool(found.isfinite().all()), f"rewards that all are {value} give {found[:3].tolist()}"

    def test_the_batch_stays_as_it_was(self) -> None:
        """Nothing is written into the batch's own tensors."""
        batch = self.make_batch()
        before = batch.to_bytes()
        self.make()(batch)
        assert batch.to_bytes() == before, "the advantage changed the batch that it was given"


class GroupFilterSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        examples: rewards of a group, and what becomes of it: its rewards afterwards, or None where it is dropped.
    """

    kind: ClassVar[str] = "group_filters"
    examples: ClassVar[Sequence[tuple[Sequence[float], Sequence[float] | None]]] = ()

    def run(self, episodes: Sequence[Episode]) -> Sequence[Episode] | None:
        """What becomes of a group."""
        found = self.make()(episodes)
        if inspect.isawaitable(found):

            async def wait() -> Sequence[Episode] | None:
                return await found

            found = asyncio.run(wait())
        return found

    def test_examples(self) -> None:
        """What the author says of it holds."""
        assert self.examples, "the suite has no examples: set `examples`"
        for rewards, wanted in self.examples:
            found = self.run(make_episodes(rewards))
            assert (found is None) == (wanted is None), f"rewards {list(rewards)}: dropped is {found is None}"
            if found is not None and wanted is not None:
                shaped = [episode.reward for episode in found]
                assert shaped == list(wanted), f"rewards {list(rewards)} become {shaped}, not {list(wanted)}"

    def test_a_group_stays_a_group(self) -> None:
        """As many episodes, each with a finite reward and the tokens that it had; nothing is changed in place."""
        for rewards in ([0.0], [1.0, 1.0], [0.0, 1.0, 0.5], [-1e6, 1e6], [0.1] * 64):
            episodes = make_episodes(rewards)
            found = self.run(episodes)
            assert [episode.reward for episode in episodes] == list(rewards), "it changed what it was given"
            if found is None:
                continue
            assert len(found) == len(episodes), f"{len(found)} episodes for {len(episodes)}"
            for before, after in zip(episodes, found, strict=True):
                assert math.isfinite(after.reward), f"a reward of {after.reward}"
                same = np.array_equal(
                    before.trajectories[0].tokens["input_ids"], after.trajectories[0].tokens["input_ids"]
                )
                assert same, "the order of the episodes, or their tokens, changed"

    def test_the_order_of_siblings_does_not_matter(self) -> None:
        """And neither does what it has seen before."""
        draw = random.Random(1)
        for _ in range(20):
            rewards = [draw.choice([0.0, 0.5, 1.0]) for _ in range(5)]
            order = draw.sample(range(5), 5)
            episodes = make_episodes(rewards)
            found, moved = self.run(episodes), self.run([episodes[i] for i in order])
            assert (found is None) == (moved is None), f"{rewards} in another order is judged differently"
            if found is not None and moved is not None:
                assert [found[i].reward for i in order] == [episode.reward for episode in moved], f"{rewards}: {order}"


def make_episodes(rewards: Sequence[float]) -> list[Episode]:
    """Episodes of one prompt with answers of 1, 2, 3, ... tokens."""
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
    """As `GroupFilterSuite`; and no group is dropped."""

    kind: ClassVar[str] = "reward_shaping"

    def run(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """What becomes of a group."""
        found = super().run(episodes)
        assert found is not None, "it drops a group: make it a group filter"
        return found
