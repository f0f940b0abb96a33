"""Reward shaping: other rewards for the answers to one prompt. A pure function of the episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.plugins import register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode


@register("reward_shaping")
def ranked(episodes: Sequence[Episode]) -> list[Episode]:
    """Replace each reward by its rank among the answers to a prompt, from 0 for the worst to 1 for the best."""
    rewards = sorted({episode.reward for episode in episodes})
    steps = max(1, len(rewards) - 1)
    return [replace(episode, reward=rewards.index(episode.reward) / steps) for episode in episodes]
