"""Group filters: which finished groups are trained on, and which of their answers. Pure functions of the episodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode, Trajectory

CUT = (FinishReason.LENGTH, FinishReason.ABORT)
"""How a trajectory ends that the policy has not ended, nor a tool."""


def zero_variance(episodes: Sequence[Episode]) -> Sequence[Episode] | None:
    """Drops a group whose rewards are all equal: all advantages would be 0 (dynamic sampling, arXiv 2503.14476).

    Rewards of tokens count with them. Where the policy plays several parts, those of each are compared. What is
    compared is the sum of the rewards: a group whose named rewards differ and cancel out is dropped, although
    `gdpo`, which normalizes each of them, would learn from it.
    """
    first: dict[str, float] = {}
    pairs = [(t.agent_id, e.reward + t.reward + _token_rewards(t)) for e in episodes for t in e.trajectories]
    return episodes if any(reward != first.setdefault(agent_id, reward) for agent_id, reward in pairs) else None


def mask_truncated(episodes: Sequence[Episode]) -> list[Episode] | None:
    """Takes trajectories out of the loss that were cut off, at the longest length or by an abort (overlong filtering,
    DAPO, arXiv 2503.14476, section 3.4): by the finish reason of their last generation, not by their length.

    Their rewards still count in the group's statistics.

    Returns:
        The group; None where no token of it is left in the loss.
    """
    shaped = [replace(e, trajectories=[_masked(t) if _is_cut(t) else t for t in e.trajectories]) for e in episodes]
    left = (bool(t.tokens["loss_mask"].any()) for episode in shaped for t in episode.trajectories)
    return shaped if any(left) else None


def _token_rewards(trajectory: Trajectory) -> float:
    """The sum over the tokens in the loss."""
    rewards = trajectory.tokens.get("token_rewards")
    return 0.0 if rewards is None else float(rewards[trajectory.tokens["loss_mask"]].sum())


def _is_cut(trajectory: Trajectory) -> bool:
    return int(trajectory.sequence["finish_reason"]) in CUT


def _masked(trajectory: Trajectory) -> Trajectory:
    nothing = np.zeros_like(trajectory.tokens["loss_mask"])
    return replace(trajectory, tokens={**trajectory.tokens, "loss_mask": nothing})
