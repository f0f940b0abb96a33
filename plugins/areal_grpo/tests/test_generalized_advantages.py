"""Advantages along episodes against loops over lists, written from the papers by index, in float64."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import Episode, FinishReason, PackedBatch, Trajectory, shift_to_predictions
from areal_core.data.packing import pack_group
from areal_grpo.generalized_advantages import gae, reinforce_pp

GOLDEN = {"rtol": 0, "atol": 1e-10}


def make_episodes(draw, groups=3, parts=3, turns=3):
    """Groups of episodes as dictionaries: parts of turns of tokens, each token with all that is known of it."""
    found = []
    for _ in range(groups):
        episodes = []
        for _ in range(draw.randint(1, 3)):
            part_list = []
            for _ in range(draw.randint(1, parts)):
                tokens = [{"turn": -1, "action": False} for _ in range(draw.randint(1, 3))]
                count = draw.randint(1, turns)
                for turn in range(count):
                    # A token of the turn may be out of the loss, as stale ones are; so may a whole turn.
                    share = draw.choice([1.0, 1.0, 0.6, 0.0])
                    written = [{"turn": turn, "action": draw.random() < share} for _ in range(draw.randint(1, 4))]
                    tokens += written + [{"turn": -1, "action": False} for _ in range(draw.randint(0, 2))]
                for token in tokens:
                    token |= {"value": draw.gauss(0, 1), "reward": draw.gauss(0, 0.3)}
                part_list.append({"tokens": tokens, "turn_rewards": [draw.gauss(0, 1) for _ in range(count)]})
            episodes.append({"parts": part_list, "reward": draw.gauss(0, 2)})
        found.append(episodes)
    return found


def pack(groups, keys=("token_rewards", "turn_rewards"), shuffle=0):
    """The batch that the runtime makes of them, shifted, in float64, its rows in another order."""
    made = []
    for number, episodes in enumerate(groups):
        written = {
            index: Episode([_trajectory(part, keys) for part in episode["parts"]], episode["reward"])
            for index, episode in enumerate(episodes)
        }
        made.append(PackedBatch.from_columns(pack_group(5 + 2 * number, (number, 0), 3, written)))
    batch = PackedBatch.concatenate(made)
    # The reward goes through float32 there; the loops shall have the same.
    batch = shift_to_predictions(batch).with_sequences(reward=batch["reward"].double())
    order = list(range(len(batch)))
    random.Random(shuffle).shuffle(order)
    return batch.select(order)


def _trajectory(part, keys):
    tokens, count = part["tokens"], len(part["tokens"])

    def column(name, dtype):
        return torch.tensor([token[name] for token in tokens], dtype=dtype)

    columns = {
        "input_ids": torch.arange(count),
        "loss_mask": column("action", torch.bool),
        "logprobs": torch.zeros(count),
        "versions": torch.zeros(count, dtype=torch.int32),
        "turn_ids": column("turn", torch.int32),
        "values": column("value", torch.float64),
    }
    if "token_rewards" in keys:
        columns["token_rewards"] = column("reward", torch.float64)
    turns = {"turn_rewards": torch.tensor(part["turn_rewards"], dtype=torch.float64)} if "turn_rewards" in keys else {}
    reason = torch.tensor(int(FinishReason.STOP), dtype=torch.int8)
    return Trajectory(columns, {"finish_reason": reason}, turns)


def actions_of(episode, keys):
    """The actions of an episode in order: (part, place, turn), and what each earns."""
    actions, earned = [], []
    for p, part in enumerate(episode["parts"]):
        for place, token in enumerate(part["tokens"]):
            if token["action"] and place > 0:
                actions.append((p, place, token["turn"]))
                earned.append(token["reward"] if "token_rewards" in keys else 0.0)
    left = float(torch.tensor(episode["reward"], dtype=torch.float32))
    if "turn_rewards" in keys:
        for p, part in enumerate(episode["parts"]):
            for turn, reward in enumerate(part["turn_rewards"]):
                own = [i for i, action in enumerate(actions) if (action[0], action[2]) == (p, turn)]
                if own:
                    earned[own[-1]] += reward
                    left -= reward
    if actions:
        earned[-1] += left
    return actions, earned


def whiten(numbers):
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / max(len(numbers) - 1, 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in numbers]


def naive(groups, keys, gamma, gae_lambda, level, *, with_values=True):
    """By (group, episode, part, place): advantage and return, one token or turn after another, from the last."""
    found = {}
    for g, episodes in enumerate(groups):
        for e, episode in enumerate(episodes):
            actions, earned = actions_of(episode, keys)
            values = [episode["parts"][p]["tokens"][place]["value"] if with_values else 0.0 for p, place, _ in actions]
            steps = []
            for i, (p, _, turn) in enumerate(actions):
                if level == "turn" and i > 0 and (actions[i - 1][0], actions[i - 1][2]) == (p, turn):
                    steps[-1].append(i)
                else:
                    steps.append([i])
            for k in range(len(steps)):
                advantage = 0.0
                for j in range(k, len(steps)):
                    reward = sum(earned[i] for i in steps[j])
                    following = values[steps[j + 1][0]] if j + 1 < len(steps) else 0.0
                    delta = reward + gamma * following - values[steps[j][0]]
                    advantage += (gamma * gae_lambda) ** (j - k) * delta
                for i in steps[k]:
                    found[g, e, *actions[i][:2]] = (advantage, advantage + values[steps[k][0]])
    return found


def of_batch(batch, flat):
    """The numbers of the tokens in the loss, by (group, episode, part, place)."""
    found, row_index, offsets = {}, batch.tokens.row_index.tolist(), batch.tokens.offsets.tolist()
    for t in batch["loss_mask"].nonzero()[:, 0].tolist():
        row = row_index[t]
        group = (int(batch["group_id"][row]) - 5) // 2
        keys = (group, int(batch["sample_index"][row]), int(batch["part_index"][row]))
        found[(*keys, t - offsets[row] + 1)] = float(flat[t])
    return found


def compare(found, wanted, tolerance=1e-10):
    assert found.keys() == wanted.keys()
    worst = max((abs(found[key] - wanted[key]) for key in wanted), default=0.0)
    assert worst <= tolerance, f"they differ by {worst}"


ALL = ("token_rewards", "turn_rewards")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize(
    "keys", [(), ("token_rewards",), ("turn_rewards",), ALL], ids=["reward", "token", "turn", "all"]
)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]), gae_lambda=st.sampled_from([0.0, 0.7, 1.0]))
def test_gae_by_index(level, keys, seed, gamma, gae_lambda):
    groups = make_episodes(random.Random(seed))
    batch = pack(groups, keys, shuffle=seed)
    wanted = naive(groups, keys, gamma, gae_lambda, level)
    found = gae(batch, gamma=gamma, gae_lambda=gae_lambda, level=level, whiten=False)
    compare(of_batch(batch, found["advantages"]), {key: pair[0] for key, pair in wanted.items()})
    compare(of_batch(batch, found["returns"]), {key: pair[1] for key, pair in wanted.items()})
    for column in found.values():
        assert column.dtype == torch.float64
        assert not column[~batch["loss_mask"]].any()


@given(seed=st.integers(0, 10**6), level=st.sampled_from(["token", "turn"]))
def test_whitening_comes_after_the_returns(seed, level):
    groups = make_episodes(random.Random(seed))
    batch = pack(groups, shuffle=seed)
    wanted = naive(groups, ALL, 0.9, 0.7, level)
    if not wanted:
        return
    found = gae(batch, gamma=0.9, gae_lambda=0.7, level=level, whiten=True)
    whitened = dict(zip(wanted, whiten([pair[0] for pair in wanted.values()]), strict=True))
    # One or two tokens may differ by little: then the rounding is divided by that little.
    compare(of_batch(batch, found["advantages"]), whitened, 1e-9)
    compare(of_batch(batch, found["returns"]), {key: pair[1] for key, pair in wanted.items()})


@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.95]))
def test_reinforce_pp_by_index(seed, gamma):
    """With λ = 1 and no values the recursion is the sum of all that follows."""
    groups = make_episodes(random.Random(seed))
    batch = pack(groups, shuffle=seed)
    wanted = {}
    for g, episodes in enumerate(groups):
        for e, episode in enumerate(episodes):
            actions, earned = actions_of(episode, ALL)
            for i, (p, place, _) in enumerate(actions):
                wanted[g, e, p, place] = sum(gamma ** (j - i) * earned[j] for j in range(i, len(actions)))
    if wanted:
        whitened = dict(zip(wanted, whiten(list(wanted.values())), strict=True))
        compare(of_batch(batch, reinforce_pp(batch, gamma=gamma)), whitened, 1e-9)


def test_in_float32():
    groups = make_episodes(random.Random(3), groups=6)
    batch = pack(groups)
    single = batch.with_columns({key: batch[key].float() for key in ("reward", "values", "token_rewards")})
    settings = {"gamma": 0.99, "gae_lambda": 0.95, "level": "token", "whiten": True}
    for name, column in gae(single, **settings).items():
        assert column.dtype == torch.float32
        torch.testing.assert_close(column.double(), gae(batch, **settings)[name], rtol=1e-5, atol=1e-5)
    assert reinforce_pp(single, gamma=1.0).dtype == torch.float32


def test_trl_on_padded_answers():
    """TRL's PPOTrainer: deltas from the last column back, whitened over the mask with an unbiased variance."""
    draw = torch.Generator().manual_seed(0)
    lengths, longest, gamma, gae_lambda = [4, 7, 1, 5], 7, 0.98, 0.9
    rewards, values = (torch.randn(4, longest, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    rewards, values = rewards * mask, values * mask
    last, reverse = 0.0, []
    for t in reversed(range(longest)):
        following = values[:, t + 1] if t < longest - 1 else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * gae_lambda * last
        reverse.append(last)
    wanted = torch.stack(reverse[::-1], 1)
    mean = wanted[mask].mean()
    whitened = (wanted - mean) * torch.rsqrt(wanted[mask].var(unbiased=True) + 1e-8)
    rows = []
    for row, length in enumerate(lengths):
        tokens = [{"turn": -1, "action": False, "value": 9.0, "reward": 9.0}]
        for t in range(length):
            number = {"value": float(values[row, t]), "reward": float(rewards[row, t])}
            tokens.append({"turn": 0, "action": True, **number})
        rows.append([{"parts": [{"tokens": tokens, "turn_rewards": [0.0]}], "reward": 0.0}])
    batch = pack(rows)
    batch = batch.select(torch.argsort(batch["group_id"]))
    found = gae(batch, gamma=gamma, gae_lambda=gae_lambda, level="token", whiten=True)
    torch.testing.assert_close(found["advantages"][batch["loss_mask"]], whitened[mask], **GOLDEN)
    torch.testing.assert_close(found["returns"][batch["loss_mask"]], (wanted + values)[mask], **GOLDEN)


def test_every_action_gets_the_reward_without_discount_and_values():
    """And what stands in between, in the prompt or behind the mask, may be infinite."""
    groups = make_episodes(random.Random(1))
    batch = pack(groups, ())
    noise = torch.where(batch["loss_mask"], 0.0, math.inf).double()
    batch = batch.with_tokens(values=noise, token_rewards=noise)
    found = gae(batch, gamma=1.0, gae_lambda=1.0, level="token", whiten=False)["advantages"]
    wanted = batch["reward"][batch.tokens.row_index]
    torch.testing.assert_close(found, torch.where(batch["loss_mask"], wanted, 0.0), **GOLDEN)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_without_a_single_action(level):
    groups = make_episodes(random.Random(2), groups=1)
    for part in (part for episode in groups[0] for part in episode["parts"]):
        part["tokens"] = [{**token, "action": False} for token in part["tokens"]]
    batch = pack(groups)
    found = gae(batch, gamma=1.0, gae_lambda=0.95, level=level, whiten=True)
    assert not any(column.any() for column in found.values())
    assert not reinforce_pp(batch, gamma=1.0).any()


def test_equal_rewards_are_whitened_to_nothing():
    batch = pack(make_episodes(random.Random(4)), ())
    for reward in (0.1, 1e6):
        equal = batch.with_sequences(reward=torch.full((len(batch),), reward, dtype=torch.float64))
        assert reinforce_pp(equal, gamma=1.0).abs().max() < 1e-5


def test_what_is_cut_off_ends_with_the_value_0():
    tokens = [{"turn": -1, "action": False}, {"turn": 0, "action": True}, {"turn": 0, "action": True}]
    part = {"tokens": [{**token, "value": 0.5, "reward": 0.0} for token in tokens], "turn_rewards": [0.0]}
    batch = pack([[{"parts": [part], "reward": 1.0}]], ())
    found = gae(batch, gamma=1.0, gae_lambda=0.0, level="token", whiten=False)
    assert found["advantages"].tolist() == [0.0, 0.5, 0.0]
    assert found["returns"].tolist() == [0.5, 1.0, 0.0]
