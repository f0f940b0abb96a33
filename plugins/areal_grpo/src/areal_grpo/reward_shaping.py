"""Reward shaping: other rewards for a finished group before it is trained on. Pure functions of its episodes.

An episode's length is the number of tokens that the policy has sampled in all of its trajectories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


def overlong_penalty(episodes: Sequence[Episode], *, max_length: int, buffer: int, factor: float) -> list[Episode]:
    """R ← R - factor clip((length - (max_length - buffer)) / buffer, 0, 1): soft overlong punishment (DAPO, arXiv
    2503.14476, equation 13, whose factor is 1).

    Args:
        episodes: of one prompt.
        max_length: tokens from which the whole penalty is due.
        buffer: tokens before it, over which the penalty grows from 0.
        factor: the largest penalty, in the unit of the reward.
    """
    lengths = [_length(episode) for episode in episodes]
    shares = [min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0) for length in lengths]
    return [replace(e, reward=e.reward - factor * share) for e, share in zip(episodes, shares, strict=True)]


def length_penalty(episodes: Sequence[Episode], *, coefficient: float, right_above: float) -> list[Episode]:
    """Among the answers to one prompt shorter ones earn more and longer ones less (Kimi k1.5, arXiv 2501.12599, section
    2.3.3): R ← R + coefficient λ for a right answer and R + coefficient min(0, λ) for a wrong one,
    λ = 1/2 - (length - shortest) / (longest - shortest), and 0 where all are equally long.

    Args:
        episodes: of one prompt.
        coefficient: how much the shortest right answer earns over the longest.
        right_above: answers with a greater reward count as right.
    """
    lengths = [_length(episode) for episode in episodes]
    spread = max(lengths) - min(lengths)
    shaped = []
    for episode, length in zip(episodes, lengths, strict=True):
        earned = 0.5 - (length - min(lengths)) / spread if spread else 0.0
        earned = earned if episode.reward > right_above else min(0.0, earned)
        shaped.append(replace(episode, reward=episode.reward + coefficient * earned))
    return shaped


def reward_bounds(episodes: Sequence[Episode], *, low: float | None, high: float | None) -> list[Episode]:
    """R ← min(max(R, low), high), each bound where it is given; named rewards stay as they are.

    Args:
        episodes: of one prompt.
        low, high: in the unit of the reward.
    """
    raised = [episode.reward if low is None else max(episode.reward, low) for episode in episodes]
    bounded = [reward if high is None else min(reward, high) for reward in raised]
    return [replace(episode, reward=reward) for episode, reward in zip(episodes, bounded, strict=True)]


def _length(episode: Episode) -> int:
    # By the versions: a workflow may have masked tokens that were sampled.
    return sum(int((trajectory.tokens["versions"] >= 0).sum()) for trajectory in episode.trajectories)
