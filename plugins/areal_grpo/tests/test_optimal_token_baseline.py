"""The optimal token baseline against loops over dictionaries, in float64, and its weight against autograd."""

from collections import defaultdict

import pytest
import torch

from areal_core.sdk import ACTOR, ForwardPass
from areal_grpo.advantage_settings import OptimalTokenBaselineSettings
from areal_grpo.generalized_advantages import optimal_token_baseline

EPSILON = 1e-8


def make_rollouts(make_batch, rewards, groups, *, episodes=None, lengths=None, with_token_rewards=False, seed=0):
    """A batch with the columns of the two forward passes, in float64."""
    batch = make_batch(rewards, groups, episodes, lengths, seed)
    draw = torch.Generator().manual_seed(seed + 1)
    logits = torch.randn(batch.token_count, 30, generator=draw, dtype=torch.float64)
    policy = logits.softmax(-1)
    tokens = torch.multinomial(policy, 1, generator=draw)
    columns = {
        "proximal_logprobs": policy.gather(1, tokens)[:, 0].log(),
        "sum_pi_squared": policy.square().sum(-1),
        "turn_ids": torch.where(batch["loss_mask"], 0, -1),
    }
    if with_token_rewards:
        columns["token_rewards"] = torch.randn(batch.token_count, generator=draw, dtype=torch.float64)
    batch = batch.with_tokens(**columns)
    return batch.with_sequences(reward=torch.tensor(rewards, dtype=torch.float64)), logits, tokens


def by_loops(batch, tail):
    """A_t of each token: a list of (position, weight, return) for each episode, then sums over a group's episodes."""
    row_index = batch.tokens.row_index.tolist()
    episodes, groups = defaultdict(list), {}
    for row, number in enumerate(batch["episode_id"].tolist()):
        groups[number] = batch["group_id"][row].item()
        for position in [p for p, r in enumerate(row_index) if r == row and batch["loss_mask"][p]]:
            episodes[number].append(position)
    token_rewards = batch.get("token_rewards")
    steps = defaultdict(list)
    for number, positions in episodes.items():
        rows = [row for row, other in enumerate(batch["episode_id"].tolist()) if other == number]
        left = sum(batch["reward"][row].item() for row in rows) / len(rows)
        earned = [0.0 if token_rewards is None else token_rewards[p].item() for p in positions]
        total, weight = left + sum(earned), 0.0
        for place, position in enumerate(positions):
            chance = batch["proximal_logprobs"][position].exp().item()
            weight += 1 - 2 * chance + batch["sum_pi_squared"][position].item()
            steps[groups[number], place].append((position, weight + EPSILON, total))
            total -= earned[place]
    found = torch.zeros(batch.token_count, dtype=torch.float64)
    for peers in steps.values():
        baseline = sum(weight * gain for _, weight, gain in peers) / sum(weight for _, weight, _ in peers)
        for position, _, gain in peers:
            found[position] = gain - baseline
            if len(peers) == 1:
                found[position] = gain if tail == "return" else 0.0
    return found


@pytest.mark.parametrize("tail", ["zero", "return"])
@pytest.mark.parametrize("with_token_rewards", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_the_loops_say(make_batch, tail, with_token_rewards, seed):
    """Answers of different lengths, groups of different sizes, and episodes of several trajectories."""
    rewards = [1.0, 0.0, 0.5, 2.0, 1.0, 1.0, -1.0]
    groups, episodes = [5, 9, 5, 9, 5, 2, 5], [0, 1, 2, 3, 4, 5, 2]
    lengths = [9, 5, 3, 11, 6, 4, 4]
    columns = {"episodes": episodes, "lengths": lengths, "with_token_rewards": with_token_rewards, "seed": seed}
    batch, *_ = make_rollouts(make_batch, rewards, groups, **columns)
    found = optimal_token_baseline(batch, tail=tail)
    torch.testing.assert_close(found, by_loops(batch, tail), atol=1e-12, rtol=1e-12)
    assert found[~batch["loss_mask"]].abs().max() == 0
    assert found.abs().max() > 0.1


def test_the_weight_is_the_squared_norm_of_the_gradient_by_the_logits(make_batch):
    """Σ over a prefix of ‖∇ log π(y)‖², differentiated by autograd, gives the baseline to 1e-6."""
    rewards = [1.0, 0.0, 0.25]
    batch, logits, tokens = make_rollouts(make_batch, rewards, [1, 1, 1], lengths=[8, 8, 8])
    logits.requires_grad_()
    chosen = logits.log_softmax(-1).gather(1, tokens).sum()
    (gradient,) = torch.autograd.grad(chosen, logits)
    norms = gradient.square().sum(-1)
    found = optimal_token_baseline(batch, tail="zero")
    sequences = [[p for p in range(8 * row, 8 * row + 8) if batch["loss_mask"][p]] for row in range(3)]
    for place in range(min(map(len, sequences))):
        weights = torch.stack([norms[positions[: place + 1]].sum() for positions in sequences])
        baseline = (weights * torch.tensor(rewards, dtype=torch.float64)).sum() / weights.sum()
        for reward, positions in zip(rewards, sequences, strict=True):
            assert found[positions[place]].item() == pytest.approx(reward - baseline.item(), abs=1e-6)


def test_a_group_of_one_and_certain_tokens(make_batch):
    """An answer without siblings has the advantage 0. If every token was certain, the baseline is the mean."""
    batch, *_ = make_rollouts(make_batch, [3.0], [1])
    assert optimal_token_baseline(batch, tail="zero").abs().max() == 0
    batch, *_ = make_rollouts(make_batch, [1.0, 0.0], [1, 1], lengths=[6, 6])
    zeros = torch.zeros(batch.token_count, dtype=torch.float64)
    both = torch.tensor([True] * 5 + [False])
    certain = batch.with_tokens(proximal_logprobs=zeros, sum_pi_squared=zeros + 1, loss_mask=both.repeat(2))
    found = optimal_token_baseline(certain, tail="zero")
    torch.testing.assert_close(found, 0.5 * both.repeat(2) * torch.tensor([1.0] * 6 + [-1.0] * 6, dtype=torch.float64))


def test_it_asks_for_two_forward_passes_of_the_policy():
    needs = OptimalTokenBaselineSettings().needs(1)
    assert [(need.role, need.output) for need in needs if isinstance(need, ForwardPass)] == [
        (ACTOR, "logprobs"),
        (ACTOR, "sum_pi_squared"),
    ]


def test_a_train_engine_that_does_not_compute_it_is_refused(read):
    from areal_core.errors import ConfigError

    with pytest.raises(ConfigError, match="Engine does not compute the output 'sum_pi_squared'"):
        read("algorithm.advantage=optimal_token_baseline")
    assert read("algorithm.advantage=optimal_token_baseline", "train_engine=fsdp")
