"""Reward shaping: pure functions that change the rewards of a finished group before it is trained on.

The length of an episode is the number of tokens that the policy has sampled in all of its trajectories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


def overlong_penalty(episodes: Sequence[Episode], *, max_length: int, buffer: int, factor: float) -> list[Episode]:
    """Lower the reward of overlong answers: R ← R - factor clip((length - (max_length - buffer)) / buffer, 0, 1).

    This is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13, with a factor of 1).

    Args:
        episodes: episodes of one prompt.
        max_length: length in tokens from which the full penalty applies.
        buffer: number of tokens below it over which the penalty grows from 0.
        factor: full penalty, in units of the reward.
    """
    lengths = [_length(episode) for episode in episodes]
    shares = [min(max((length - (max_length - buffer)) / buffer, 0.0), 1.0) for length in lengths]
    return [replace(e, reward=e.reward - factor * share) for e, share in zip(episodes, shares, strict=True)]


def length_penalty(episodes: Sequence[Episode], *, coefficient: float, right_above: float) -> list[Episode]:
    """Raise the reward of shorter answers to a prompt and lower that of longer ones (Kimi k1.5, arXiv 2501.12599,
    section 2.3.3).

    R ← R + coefficient λ for a correct answer and R + coefficient min(0, λ) for a wrong one, with
    λ = 1/2 - (length - shortest) / (longest - shortest), or 0 if all lengths are equal.

    Args:
        episodes: episodes of one prompt.
        coefficient: difference in reward between the shortest and the longest correct answer.
        right_above: an answer with a reward above this is correct.
    """
    lengths = [_length(episode) for episode in episodes]
    spread = max(lengths) - min(lengths)
    shaped = []
    for episode, length in zip(episodes, lengths, strict=True):
        bonus = 0.5 - (length - min(lengths)) / spread if spread else 0.0
        bonus = bonus if episode.reward > right_above else min(0.0, bonus)
        shaped.append(replace(episode, reward=episode.reward + coefficient * bonus))
    return shaped


def reward_bounds(episodes: Sequence[Episode], *, low: float | None, high: float | None) -> list[Episode]:
    """Bound the reward: R ← min(max(R, low), high). Named rewards are not changed.

    Args:
        episodes: episodes of one prompt.
        low, high: bounds in units of the reward; None: no bound.
    """
    at_least_low = [episode.reward if low is None else max(episode.reward, low) for episode in episodes]
    bounded = [reward if high is None else min(reward, high) for reward in at_least_low]
    return [replace(episode, reward=reward) for episode, reward in zip(episodes, bounded, strict=True)]


def _length(episode: Episode) -> int:
    # Count by versions, not by `loss_mask`: a workflow may have masked sampled tokens.
    return sum(int((trajectory.tokens["versions"] >= 0).sum()) for trajectory in episode.trajectories)
