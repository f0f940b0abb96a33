"""Advantages along an episode: rewards count where they are earned, and later rewards count for earlier actions.

The batch is shifted: position t of a token column belongs to `targets[t]`, an action if `loss_mask` is on, and
`values[t]` is the value of the state before that action. The actions of an episode are those of all its trajectories,
in the order of `part_index` (without that column in the order of the batch). If the policy plays several agents in an
episode, the actions of each agent are treated as an episode of their own. Prompts, tool results and masked tokens
between actions take no time: value and advantage pass over them unchanged.

An action earns its `token_rewards` and, if it is the last one of a turn, the turn's `turn_rewards`. The last action of
an episode also earns the difference between the episode's reward and the rewards of its turns; the reward of several
trajectories is their mean. A turn without a token in the loss leaves its reward to that last action. After it the value
is 0, also if the answer was cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal_core.data import by_agent
from areal_grpo.statistics import token_rewards, whitened

if TYPE_CHECKING:
    from areal_core.data import PackedBatch

SMALLEST_WEIGHT = 1e-8
"""Added to each weight of the optimal token baseline, so that it is the mean of the returns if every token was
certain."""


def gae(batch: PackedBatch, *, gamma: float, gae_lambda: float, level: str, whiten: bool) -> dict[str, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, equations 11 to 16), back from an episode's last step:
    δ_k = r_k + γ V_{k+1} - V_k;  A_k = δ_k + γ λ A_{k+1};  the return that a critic learns is A_k + V_k.

    A step k is a token or a whole turn. The reward of a turn is the sum over its tokens, its value that of the state
    before its first token, and all its tokens get its advantage and its return.

    Args:
        batch: with `values`, `loss_mask` and `turn_ids` [T], `reward` and `episode_id` [B].
        gamma: γ.
        gae_lambda: λ.
        level: "token" or "turn".
        whiten: whether to whiten the advantages over the tokens in the loss.

    Returns:
        `advantages` [T], and `returns` [T] from before whitening; both 0 outside `loss_mask`, in the dtype of `values`.
    """
    actions = Actions.of(batch)
    values = batch["values"][actions.position].double()
    steps = torch.arange(len(values), device=values.device) if level == "token" else actions.turn
    first = torch.ones_like(steps, dtype=torch.bool)
    first[1:] = steps[1:] != steps[:-1]
    rewards = values.new_zeros(int(first.sum())).index_add(0, steps, rewards_of(batch, actions))
    estimated = backwards(rewards, values[first], actions.episode[first], gamma, gae_lambda)
    advantages = actions.spread(batch, estimated[steps])
    returns = actions.spread(batch, (estimated + values[first])[steps])
    if whiten:
        advantages = whitened(advantages, batch["loss_mask"])
    return {"advantages": advantages.to(batch["values"].dtype), "returns": returns.to(batch["values"].dtype)}


def reinforce_pp(batch: PackedBatch, *, gamma: float) -> torch.Tensor:
    """Return A_t = Σ_{k≥t} γ^{k-t} r_k, whitened over all tokens in the loss (REINFORCE++, arXiv 2501.03262).

    It needs no critic and no groups.

    Args:
        batch: with `loss_mask` and `turn_ids` [T], `reward` and `episode_id` [B].
        gamma: γ.

    Returns:
        [T] in the dtype of `reward`, 0 outside `loss_mask`.
    """
    actions = Actions.of(batch)
    rewards = rewards_of(batch, actions)
    returns = backwards(rewards, torch.zeros_like(rewards), actions.episode, gamma, 1.0)
    return whitened(actions.spread(batch, returns), batch["loss_mask"]).to(batch["reward"].dtype)


def optimal_token_baseline(batch: PackedBatch, *, tail: str) -> torch.Tensor:
    """Return A_t = G_t - B_t with B_t = Σ_i W_i,t G_i,t / Σ_i W_i,t over the group's episodes that have a t-th action
    (optimal token baseline, arXiv 2602.07078; verl's `optimal_token_baseline`).

    G_t is the sum of the rewards from action t on. W_t = Σ_{j≤t} w_j, with w_j = 1 - 2 π(y_j) + Σ_v π(v)², is the
    variance that the episode's actions have added to the gradient so far: w_j is the squared norm of the gradient of
    log π(y_j) by the logits. So answers with unlikely tokens count more in the baseline, which approximately minimizes
    the variance of the gradient at each t. Unlike that of `leave_one_out`, the baseline includes the answer itself;
    this bias shrinks as groups grow. Actions of all turns are counted together, without the tool results between them,
    as in verl's variant for several turns.

    π is the policy at the start of the batch. Advantages are not divided by a deviation. With all W equal, B is the
    mean of the returns that reach t. verl can also weigh w by the squared importance weight of stale tokens; here w
    has no such weight.

    Args:
        batch: with `sum_pi_squared`, `proximal_logprobs`, `loss_mask` and `turn_ids` [T], `reward`, `group_id` and
            `episode_id` [B].
        tail: Advantage where only one episode of a group has a t-th action, whose baseline would be its own return:
            "zero", or "return" for G_t itself (verl's `handle_zero_tail`).

    Returns:
        [T] in the dtype and unit of `reward`, 0 outside `loss_mask`.

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> on, turn = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
        >>> chances, squares = torch.tensor([0.5, 0.5, 0.9, 0.9]), torch.tensor([0.5, 0.5, 0.82, 0.82])
        >>> columns = {"proximal_logprobs": chances.log(), "sum_pi_squared": squares, "loss_mask": on, "turn_ids": turn}
        >>> tokens = Ragged(torch.tensor([2, 2]), {"input_ids": torch.arange(4), **columns})
        >>> ids = {"group_id": torch.tensor([7, 7]), "episode_id": torch.tensor([0, 1])}
        >>> batch = PackedBatch(tokens, {"reward": torch.tensor([1.0, 0.0]), **ids})
        >>> optimal_token_baseline(batch, tail="zero")  # w is 0.5 and 0.02: the first answer has most of the baseline
        tensor([ 0.0385,  0.0385, -0.9615, -0.9615])
    """
    actions = Actions.of(batch)
    rewards = rewards_of(batch, actions)
    returns = backwards(rewards, torch.zeros_like(rewards), actions.episode, 1.0, 1.0)
    chances = batch["proximal_logprobs"][actions.position].double().exp()
    variances = (1 - 2 * chances + batch["sum_pi_squared"][actions.position].double()).clamp(min=0)
    counts = torch.bincount(actions.episode)
    first = (counts.cumsum(0) - counts)[actions.episode]
    number = torch.arange(len(first), device=first.device) - first
    total = variances.cumsum(0)
    weights = total - (total - variances)[first] + SMALLEST_WEIGHT
    group = by_agent(batch, "group_id")[actions.row]
    # The t-th actions of a group have one number.
    _, peers = torch.unique(torch.stack([group, number]), dim=1, return_inverse=True)
    sums = returns.new_zeros(2, len(peers)).index_add(1, peers, torch.stack([weights * returns, weights]))
    baselines = (sums[0] / sums[1])[peers]
    is_alone = torch.bincount(peers)[peers] == 1
    baselines = torch.where(is_alone, 0.0 if tail == "return" else returns, baselines)
    return actions.spread(batch, returns - baselines).to(batch["reward"].dtype)


@dataclass(frozen=True, slots=True)
class Actions:
    """The N actions of a batch, by episode and in order within each episode.

    Attributes:
        position: [N] int64, position of each action in the batch.
        row: [N] int64, its sequence.
        episode: [N] int64, its episode, numbered from 0.
        turn: [N] int64, its turn, numbered from 0 through the whole batch in this order.
    """

    position: torch.Tensor
    row: torch.Tensor
    episode: torch.Tensor
    turn: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> Actions:
        """Return the actions of a shifted batch with `loss_mask`, `turn_ids`, `episode_id`, and `part_index` if any."""
        episode = by_agent(batch, "episode_id")
        part = batch.get("part_index")
        order = torch.argsort(torch.zeros_like(episode) if part is None else part, stable=True)
        order = order[torch.argsort(episode[order], stable=True)]
        rank = torch.argsort(order)
        position = batch["loss_mask"].nonzero()[:, 0]
        row = batch.tokens.row_index
        position = position[torch.argsort(rank[row[position]], stable=True)]
        row, turn_ids = row[position], batch["turn_ids"][position]
        begins = torch.ones_like(position, dtype=torch.bool)
        begins[1:] = (row[1:] != row[:-1]) | (turn_ids[1:] != turn_ids[:-1])
        return cls(position, row, episode[row], begins.cumsum(0) - 1)

    def spread(self, batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
        """Return the values [N] of the actions at their positions, [T], with 0 elsewhere."""
        return values.new_zeros(batch.token_count).index_copy(0, self.position, values)


def rewards_of(batch: PackedBatch, actions: Actions) -> torch.Tensor:
    """Return the reward that each action earns, [N] float64."""
    per_token = token_rewards(batch)
    count = len(actions.position)
    rewards_of_actions = torch.zeros(count, dtype=torch.float64, device=actions.position.device)
    paid_by_episode = rewards_of_actions.new_zeros(len(batch))
    if batch.turns is not None and "turn_rewards" in batch.turns.values:
        turn = batch["turn_ids"][actions.position].long()
        has_reward = ((turn >= 0) & (turn < batch.turns.lengths[actions.row])).nonzero()[:, 0]
        turn_index = (batch.turns.offsets[actions.row] + turn)[has_reward]
        rewards = batch.turns.values["turn_rewards"].double()
        last = torch.full_like(rewards, -1, dtype=torch.int64).scatter_reduce(0, turn_index, has_reward, "amax")
        ended, rewards = last[last >= 0], rewards[last >= 0]
        rewards_of_actions = rewards_of_actions.index_add(0, ended, rewards)
        paid_by_episode = paid_by_episode.index_add(0, actions.episode[ended], rewards)
    ends = torch.ones(count, dtype=torch.bool, device=rewards_of_actions.device)
    ends[:-1] = actions.episode[1:] != actions.episode[:-1]
    episode = by_agent(batch, "episode_id")
    rest = (-paid_by_episode).index_add(0, episode, batch["reward"].double() / torch.bincount(episode)[episode])
    rewards_of_actions = rewards_of_actions + torch.where(ends, rest[actions.episode], 0.0)
    return rewards_of_actions + (0.0 if per_token is None else per_token[actions.position])


def backwards(
    rewards: torch.Tensor, values: torch.Tensor, episode: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Run the recursion over [S] steps in the order of episodes, in as many rounds as the longest episode has steps."""
    if not len(rewards):
        return rewards
    counts = torch.bincount(episode)
    number = torch.arange(len(episode), device=episode.device) - (counts.cumsum(0) - counts)[episode]
    # Episodes side by side, [steps of the longest, episodes]. After the end of an episode all values are 0.
    empty = rewards.new_zeros(int(counts.max()), len(counts))
    reward, value = (empty.index_put((number, episode), column) for column in (rewards, values))
    advantages = torch.empty_like(empty)
    later = following = empty.new_zeros(len(counts))
    for step in reversed(range(len(empty))):
        later = reward[step] + gamma * following - value[step] + gamma * gae_lambda * later
        following, advantages[step] = value[step], later
    return advantages[number, episode]
