"""Group filters: pure functions that drop finished groups, or take answers out of the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Episode, Trajectory

CUT = (FinishReason.LENGTH, FinishReason.ABORT)
"""Finish reasons of a trajectory that neither the policy nor a tool has ended."""


def zero_variance(episodes: Sequence[Episode]) -> Sequence[Episode] | None:
    """Drop a group whose rewards are all equal, because all its advantages would be 0 (dynamic sampling, arXiv
    2503.14476).

    Rewards of tokens count. If the policy plays several agents, the rewards of each agent are compared. The sum of the
    named rewards is compared: a group whose named rewards differ but cancel out is dropped, although `gdpo`, which
    normalizes each of them, could learn from it.

    Returns:
        The group, or None to drop it.
    """
    first: dict[str, float] = {}
    pairs = [(t.agent_id, e.reward + t.reward + _token_rewards(t)) for e in episodes for t in e.trajectories]
    return episodes if any(reward != first.setdefault(agent_id, reward) for agent_id, reward in pairs) else None


def mask_truncated(episodes: Sequence[Episode]) -> list[Episode] | None:
    """Take truncated trajectories out of the loss (overlong filtering, DAPO, arXiv 2503.14476, section 3.4).

    A trajectory is truncated if its last generation reached the maximum length or was aborted. Its reward still counts
    in the statistics of the group.

    Returns:
        The group; None if no token of it is left in the loss.
    """
    shaped = [replace(e, trajectories=[_masked(t) if _is_cut(t) else t for t in e.trajectories]) for e in episodes]
    left = (bool(t.tokens["loss_mask"].any()) for episode in shaped for t in episode.trajectories)
    return shaped if any(left) else None


def _token_rewards(trajectory: Trajectory) -> float:
    """Return the sum of the rewards of the tokens in the loss."""
    rewards = trajectory.tokens.get("token_rewards")
    return 0.0 if rewards is None else float(rewards[trajectory.tokens["loss_mask"]].sum())


def _is_cut(trajectory: Trajectory) -> bool:
    return int(trajectory.sequence["finish_reason"]) in CUT


def _masked(trajectory: Trajectory) -> Trajectory:
    nothing = np.zeros_like(trajectory.tokens["loss_mask"])
    return replace(trajectory, tokens={**trajectory.tokens, "loss_mask": nothing})
