"""Advantages that compare the turns of different episodes which began in the same state (GiGPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent
from areal_grpo.advantages import group_centered, group_normalized
from areal_grpo.generalized_advantages import Actions, backwards, rewards_of

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


def gigpo(batch: PackedBatch, *, step_weight: float, gamma: float, normalization: str, epsilon: float) -> torch.Tensor:
    """Return A_k = A(episode) + ω A(step) for each turn k (GiGPO, arXiv 2505.10978, equations 3 to 8).

    A(episode) is `group_normalized`, or `group_centered` without a normalization. A(step) compares the turns of a
    prompt's episodes that began in the same state (anchor states): (R_k - mean R) / (std R + ε), with the unbiased std
    over these turns and R_k = Σ_{j≥k} γ^{j-k} r_j over the rewards of the turns from k on. A state that occurs once has
    A(step) = 0. verl-agent, the authors' code, has the same A(step). Its A(episode) takes mean and std over all turns
    of the group's episodes, so that long episodes count more; here they are over the episodes, as in the paper.

    The state is the text that the environment returned before the turn: all tokens after the policy's previous turn, or
    the prompt before the first one. So the environment's observation must describe its state, as a board does; the
    history before the observation may differ. If the chat template rewrites earlier turns, each turn is a trajectory of
    its own that begins with the whole history, and only turns with equal histories share a state.

    Args:
        batch: with `input_ids`, `loss_mask` and `turn_ids` [T], `reward`, `group_id` and `episode_id` [B], and the
            workflow's `turn_rewards` if it has any.
        step_weight: ω.
        gamma: γ.
        normalization: `std` or `none`, for both advantages.
        epsilon: ε.

    Returns:
        [T] in the dtype of `reward`, equal for the tokens of a turn, 0 outside `loss_mask`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> columns = {  # two episodes of two turns; the observation 5 occurs in both, then one goes on to 6
        ...     "input_ids": torch.tensor([5, 1, 6, 2, 5, 3, 5, 4]),
        ...     "loss_mask": torch.tensor([True, False, True, False, True, False, True, False]),
        ...     "turn_ids": torch.tensor([0, -1, 1, -1, 0, -1, 1, -1]),
        ... }
        >>> ids = {"group_id": torch.tensor([0, 0]), "episode_id": torch.tensor([0, 1])}
        >>> batch = PackedBatch(Ragged(torch.tensor([4, 4]), columns), {"reward": torch.tensor([1.0, 0.0]), **ids})
        >>> settings = {"step_weight": 1.0, "gamma": 1.0, "normalization": "none", "epsilon": 1e-6}
        >>> gigpo(batch, **settings)[columns["loss_mask"]]  # the turn after 6 has no turn to be compared with
        tensor([ 1.1667,  0.5000, -0.8333, -0.8333])
    """
    is_normalized = normalization == "std"
    of_episode = group_normalized(batch, epsilon=epsilon) if is_normalized else group_centered(batch)
    actions = Actions.of(batch)
    begins = torch.ones_like(actions.turn, dtype=torch.bool)
    begins[1:] = actions.turn[1:] != actions.turn[:-1]
    rewards = torch.zeros(int(begins.sum()), dtype=torch.float64, device=begins.device)
    rewards = rewards.index_add(0, actions.turn, rewards_of(batch, actions))
    returns = backwards(rewards, torch.zeros_like(rewards), actions.episode[begins], gamma, 1.0)
    state = _states(batch, actions.position[begins], actions.row[begins])
    of_step = _compared(returns, state, epsilon if is_normalized else None)
    spread = of_episode.double()[batch.tokens.row_index] + step_weight * actions.spread(batch, of_step[actions.turn])
    return torch.where(batch["loss_mask"], spread, 0.0).to(batch["reward"].dtype)


def _compared(returns: torch.Tensor, state: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """Return (R - mean R) / (std R + ε) over the turns of each state, [S]; without ε, R - mean R."""
    count = torch.bincount(state).double()

    def mean(values: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
        return (torch.zeros_like(count).index_add(0, state, values) / degrees)[state]

    centered = returns - mean(returns, count)
    if epsilon is None:
        return centered
    return centered / (mean(centered.square(), (count - 1).clamp(min=1)).sqrt() + epsilon)


def _states(batch: PackedBatch, position: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return a number for the state before each turn, [S] int64; equal for turns of one group with equal observations.

    Args:
        batch: the shifted batch.
        position: [S], position that predicts the first token in the loss of each turn.
        row: [S], the turn's sequence.
    """
    group = by_agent(batch, "group_id").tolist()
    offsets, ids, turns = batch.tokens.offsets.tolist(), batch["input_ids"].cpu(), batch["turn_ids"].tolist()
    known: dict[tuple[int, bytes], int] = {}
    numbers = []
    for place, sequence in zip(position.tolist(), row.tolist(), strict=True):
        # In a shifted batch turn_ids[t] is that of token t + 1. Tokens of a turn may be out of the loss.
        first = offsets[sequence]
        end = place
        while end > first and turns[end - 1] == turns[place]:
            end -= 1
        start = end
        while start > first and (start - 1 == first or turns[start - 2] < 0):
            start -= 1
        key = group[sequence], ids[start : end + 1].numpy().tobytes()
        numbers.append(known.setdefault(key, len(known)))
    return torch.tensor(numbers, dtype=torch.int64, device=position.device)
