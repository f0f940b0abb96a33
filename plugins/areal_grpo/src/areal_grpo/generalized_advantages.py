"""Advantages along an episode: rewards count where they are earned, and what follows counts for what led to it.

The batch is shifted: position t of a token column is about `targets[t]`, an action where `loss_mask` is on, and
`values[t]` is the value of the state before that action. An episode's actions are those of all of its trajectories, in
the order of `part_index` (without that column in the order of the batch); where the policy plays several parts in it,
each agent's are an episode of their own. Prompts, tools' answers and masked tokens between them are no time that
passes: value and advantage go over them unchanged.

What an action earns is its `token_rewards`, the `turn_rewards` of the turn that it ends, and, as the episode's last
one, what the episode's reward is more than the turns'; of several trajectories it is the mean of theirs. A turn that
has no token in the loss leaves its reward to that last action. Behind it the value is 0, also where the answer was cut
off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent
from areal_grpo.statistics import token_rewards, whitened

if TYPE_CHECKING:
    from areal_core.data import PackedBatch


def gae(batch: PackedBatch, *, gamma: float, gae_lambda: float, level: str, whiten: bool) -> dict[str, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equations 11 to 16), back from an episode's last step:
    δ_k = r_k + γ V_{k+1} - V_k;  A_k = δ_k + γ λ A_{k+1};  the return that a critic learns is A_k + V_k.

    A step k is a token, or a whole turn: its reward is then the sum over its tokens, its value that of the state before
    its first one, and all of its tokens have its advantage and its return.

    Returns:
        `advantages` [T], whitened over the tokens in the loss where that is asked for, and `returns` [T], before that;
        both 0 outside `loss_mask`, in the dtype of `values`.
    """
    actions = _Actions.of(batch)
    values = batch["values"][actions.place].double()
    steps = torch.arange(len(values), device=values.device) if level == "token" else actions.turn
    first = torch.ones_like(steps, dtype=torch.bool)
    first[1:] = steps[1:] != steps[:-1]
    rewards = values.new_zeros(int(first.sum())).index_add(0, steps, _rewards(batch, actions))
    found = _backwards(rewards, values[first], actions.episode[first], gamma, gae_lambda)
    advantages, returns = (actions.spread(batch, each[steps]) for each in (found, found + values[first]))
    if whiten:
        advantages = whitened(advantages, batch["loss_mask"])
    return {"advantages": advantages.to(batch["values"].dtype), "returns": returns.to(batch["values"].dtype)}


def reinforce_pp(batch: PackedBatch, *, gamma: float) -> torch.Tensor:
    """A_t = Σ_{k≥t} γ^{k-t} r_k, whitened over all tokens in the loss (REINFORCE++, arXiv 2501.03262): no critic, and
    no comparison within a group.

    Returns:
        [T] in the dtype of `reward`, 0 outside `loss_mask`.
    """
    actions = _Actions.of(batch)
    rewards = _rewards(batch, actions)
    found = _backwards(rewards, torch.zeros_like(rewards), actions.episode, gamma, 1.0)
    return whitened(actions.spread(batch, found), batch["loss_mask"]).to(batch["reward"].dtype)


@dataclass(frozen=True, slots=True)
class _Actions:
    """The N actions of a batch, episode by episode and in order within each.

    Attributes:
        place: [N] int64, the position of each in the batch.
        row: [N] int64, its sequence.
        episode: [N] int64, its episode, numbered from 0.
        turn: [N] int64, its turn, numbered from 0 through the whole batch in this order.
    """

    place: torch.Tensor
    row: torch.Tensor
    episode: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> _Actions:
        episode = by_agent(batch, "episode_id")
        part = batch.get("part_index")
        order = torch.argsort(torch.zeros_like(episode) if part is None else part, stable=True)
        order = order[torch.argsort(episode[order], stable=True)]
        rank = torch.argsort(order)
        place = batch["loss_mask"].nonzero()[:, 0]
        row = batch.tokens.row_index
        place = place[torch.argsort(rank[row[place]], stable=True)]
        row, written = row[place], batch["turn_ids"][place]
        begins = torch.ones_like(place, dtype=torch.bool)
        begins[1:] = (row[1:] != row[:-1]) | (written[1:] != written[:-1])
        return cls(place, row, episode[row], begins.cumsum(0) - 1)

    def spread(self, batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
        """Values [N] of the actions at their places, [T], 0 elsewhere."""
        return values.new_zeros(batch.token_count).index_copy(0, self.place, values)


def _rewards(batch: PackedBatch, actions: _Actions) -> torch.Tensor:
    """[N] float64: what each action earns."""
    single = token_rewards(batch)
    count = len(actions.place)
    earned = torch.zeros(count, dtype=torch.float64, device=actions.place.device)
    paid = earned.new_zeros(len(batch))
    if batch.turns is not None and "turn_rewards" in batch.turns.values:
        turn = batch["turn_ids"][actions.place].long()
        known = ((turn >= 0) & (turn < batch.turns.lengths[actions.row])).nonzero()[:, 0]
        place = (batch.turns.offsets[actions.row] + turn)[known]
        rewards = batch.turns.values["turn_rewards"].double()
        last = torch.full_like(rewards, -1, dtype=torch.int64).scatter_reduce(0, place, known, "amax")
        ended, rewards = last[last >= 0], rewards[last >= 0]
        earned = earned.index_add(0, ended, rewards)
        paid = paid.index_add(0, actions.episode[ended], rewards)
    ends = torch.ones(count, dtype=torch.bool, device=earned.device)
    ends[:-1] = actions.episode[1:] != actions.episode[:-1]
    episode = by_agent(batch, "episode_id")
    left = (-paid).index_add(0, episode, batch["reward"].double() / torch.bincount(episode)[episode])
    return earned + torch.where(ends, left[actions.episode], 0.0) + (0.0 if single is None else single[actions.place])


def _backwards(
    rewards: torch.Tensor, values: torch.Tensor, episode: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """The recursion over [S] steps that stand episode by episode: one round for each step of the longest episode."""
    if not len(rewards):
        return rewards
    counts = torch.bincount(episode)
    number = torch.arange(len(episode), device=episode.device) - (counts.cumsum(0) - counts)[episode]
    # Episodes side by side, [steps of the longest, episodes]; behind an episode's end all is 0, and so is what it adds.
    empty = rewards.new_zeros(int(counts.max()), len(counts))
    reward, value = (empty.index_put((number, episode), each) for each in (rewards, values))
    advantages = torch.empty_like(empty)
    later = following = empty.new_zeros(len(counts))
    for step in reversed(range(len(empty))):
        later = reward[step] + gamma * following - value[step] + gamma * gae_lambda * later
        following, advantages[step] = value[step], later
    return advantages[number, episode]
