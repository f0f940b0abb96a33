"""Advantages of whole episodes against loops over dictionaries, written from the papers, in float64."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_grpo.advantages import (
    gdpo,
    group_centered,
    group_normalized,
    leave_one_out,
    lite_ppo,
    max_rl,
    pass_at_k,
    reinforce_pp_baseline,
)

EPSILON = 1e-6
WEIGHTS = {"right": 2.0}
COMPONENTS = ("brief", "right")


def mean(numbers):
    return sum(numbers) / len(numbers)


def deviation(numbers):
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


@st.composite
def batches(draw):
    """Rows (group, episode), the rewards of episodes by name, and for each row a seed of what its tokens earn."""
    rows, episodes = [], {}
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 4))):
            number = 100 + len(episodes)
            named = {name: draw(st.floats(-3, 3, width=16)) for name in ("reward", *COMPONENTS)}
            episodes[number] = {"group": 10 * group, **named}
            rows += [(10 * group, number)] * draw(st.integers(1, 3))
    return draw(st.permutations(rows)), episodes, draw(st.integers(0, 100)), draw(st.booleans())


def pack(drawn, make_batch):
    """The batch in float64, and the episodes with what their tokens have earned added to `reward`."""
    rows, episodes, seed, with_tokens = drawn
    batch = make_batch([0.0] * len(rows), [group for group, _ in rows], [number for _, number in rows], seed=seed)
    for name in ("reward", *COMPONENTS):
        key = name if name == "reward" else f"reward.{name}"
        values = torch.tensor([episodes[number][name] for _, number in rows], dtype=torch.float64)
        batch = batch.with_sequences(**{key: values})
    known = {number: {**episode, "token_rewards": 0.0} for number, episode in episodes.items()}
    if with_tokens:
        draw = torch.Generator().manual_seed(seed)
        earned = torch.randn(batch.token_count, generator=draw, dtype=torch.float64)
        batch = batch.with_tokens(token_rewards=torch.where(batch["loss_mask"], earned, math.nan))
        for t, row in enumerate(batch.tokens.row_index.tolist()):
            if bool(batch["loss_mask"][t]):
                known[rows[row][1]]["token_rewards"] += float(earned[t])
    for episode in known.values():
        episode["all"] = episode["reward"] + episode["token_rewards"]
    return batch, known, with_tokens


def siblings(known, number, name="all"):
    return [other[name] for other in known.values() if other["group"] == known[number]["group"]]


def normalized(known, number, name="all"):
    others = siblings(known, number, name)
    return (known[number][name] - mean(others)) / (deviation(others) + EPSILON)


def centered(known, number, name="all"):
    return known[number][name] - mean(siblings(known, number, name))


def without_itself(known, number):
    others = siblings(known, number)
    count = len(others)
    return known[number]["all"] - (sum(others) - known[number]["all"]) / (count - 1) if count > 1 else 0.0


def spread_of_the_batch(known, number):
    return centered(known, number) / (deviation([other["all"] for other in known.values()]) + EPSILON)


def over_the_mean(known, number):
    center = mean(siblings(known, number))
    return (known[number]["all"] - center) / center if center > 0 else 0.0


def added_to_the_best_of(k, known, number):
    """By listing every subset, as the definition has it."""
    others = [
        other["all"] for key, other in known.items() if other["group"] == known[number]["group"] and key != number
    ]
    if not others:
        return 0.0
    subsets = list(itertools.combinations(others, len(others) if k is None else min(k - 1, len(others))))
    return sum(max(known[number]["all"], *chosen) - max(chosen) for chosen in subsets) / len(subsets)


PAIRS = {
    "group_normalized": (partial(group_normalized, epsilon=EPSILON), normalized),
    "group_centered": (group_centered, centered),
    "leave_one_out": (leave_one_out, without_itself),
    "lite_ppo": (partial(lite_ppo, epsilon=EPSILON), spread_of_the_batch),
    "max_rl": (max_rl, over_the_mean),
    "pass_at_k": (partial(pass_at_k, k=None), partial(added_to_the_best_of, None)),
    "pass_at_k, 2": (partial(pass_at_k, k=2), partial(added_to_the_best_of, 2)),
    "pass_at_k, 3": (partial(pass_at_k, k=3), partial(added_to_the_best_of, 3)),
}


def compare(found, wanted, scale=1.0):
    """To 1e-10, or what rounding leaves of it where a number was divided by almost nothing."""
    assert found.dtype == torch.float64
    bound = 1e-10 * max(1.0, scale)
    worst = max((abs(a - b) for a, b in zip(found.tolist(), wanted, strict=True)), default=0.0)
    assert worst <= bound, f"they differ by {worst}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
@given(drawn=batches())
def test_by_episode(name, drawn, make_batch):
    advantage, naive = PAIRS[name]
    batch, known, _ = pack(drawn, make_batch)
    wanted = [naive(known, number) for number in batch["episode_id"].tolist()]
    divisors = [abs(mean(siblings(known, number))) for number in known] if name == "max_rl" else [1.0]
    # Where rewards are equal but for their rounding, that rounding of 1e-16 is divided by ε.
    compare(advantage(batch), wanted, max(20.0, 1 / max(min(divisors), 1e-12)))


@given(drawn=batches())
def test_reinforce_pp_with_a_baseline(drawn, make_batch):
    """Every token in the loss counts once in the statistics, so that long answers count more."""
    batch, known, _ = pack(drawn, make_batch)
    rows, mask = batch.tokens.row_index.tolist(), batch["loss_mask"].tolist()
    each = {t: centered(known, int(batch["episode_id"][row])) for t, row in enumerate(rows) if mask[t]}
    if not each:
        return
    center, count = mean(list(each.values())), len(each)
    variance = sum((x - center) ** 2 for x in each.values()) / max(count - 1, 1)
    wanted = [(each[t] - center) / math.sqrt(variance + 1e-8) if t in each else 0.0 for t in range(len(rows))]
    compare(reinforce_pp_baseline(batch), wanted)


@given(drawn=batches())
def test_gdpo(drawn, make_batch):
    batch, known, with_tokens = pack(drawn, make_batch)
    total = {n: sum(WEIGHTS.get(name, 1.0) * normalized(known, n, name) for name in COMPONENTS) for n in known}
    if with_tokens:
        total = {n: value + centered(known, n, "token_rewards") for n, value in total.items()}
    center, spread = mean(list(total.values())), deviation(list(total.values()))
    wanted = [(total[number] - center) / (spread + EPSILON) for number in batch["episode_id"].tolist()]
    compare(gdpo(batch, weights=WEIGHTS, epsilon=EPSILON), wanted, 20 / (spread + EPSILON))


def test_in_gdpo_the_coefficient_of_a_penalty_counts(make_batch):
    """Over the penalty's own deviation it would cancel."""
    batch = make_batch([0.0] * 4, [0] * 4).with_sequences(**{"reward.right": torch.tensor([1.0, 0.0, 1.0, 0.0])})
    penalty = torch.linspace(0, -3, batch.token_count)
    small, large = (
        gdpo(batch.with_tokens(token_rewards=coefficient * penalty), weights={}, epsilon=EPSILON)
        for coefficient in (0.01, 1.0)
    )
    assert not torch.allclose(small, large, atol=0.1)


def test_gdpo_as_trl_sums_it(make_batch):
    """TRL's `normalize_then_sum` on complete groups: each reward by its group, weighted, then by the whole batch."""
    size = 3
    draw = torch.Generator().manual_seed(1)
    rewards = torch.randn(12, 2, generator=draw, dtype=torch.float64)
    batch = make_batch([0.0] * 12, [row // size for row in range(12)])
    batch = batch.with_sequences(reward=torch.zeros(12, dtype=torch.float64))
    batch = batch.with_sequences(**{"reward.a": rewards[:, 0], "reward.b": rewards[:, 1]})
    grouped = rewards.view(-1, size, 2)
    each = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    total = (each.view(-1, 2) * torch.tensor([1.0, 0.5], dtype=torch.float64)).sum(1)
    wanted = (total - total.mean()) / (total.std() + 1e-4)
    found = gdpo(batch, weights={"b": 0.5}, epsilon=1e-4)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_gdpo_tells_which_rewards_there_are(make_batch):
    batch = make_batch([1.0, 0.0], [0, 0]).with_sequences(**{"reward.right": torch.tensor([1.0, 0.0])})
    with pytest.raises(KeyError, match=r"weights for \['wrong'\], but the batch has the rewards \['right'\]"):
        gdpo(batch, weights={"wrong": 1.0}, epsilon=EPSILON)
    with pytest.raises(KeyError, match=r"the batch has the rewards \[\]"):
        gdpo(make_batch([1.0, 0.0], [0, 0]), weights={}, epsilon=EPSILON)


def test_two_rewards_that_grpo_cannot_tell_apart(make_batch):
    """The paper's example: (0, 1) and (0, 2) in one group of two are one and the same to GRPO, and not to GDPO."""
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    batch = make_batch([0.0] * 4, [0, 0, 1, 1]).with_sequences(reward=rewards.sum(1))
    batch = batch.with_sequences(**{"reward.a": rewards[:, 0], "reward.b": rewards[:, 1]})
    one, both = group_normalized(batch, epsilon=EPSILON)[[1, 3]].tolist()
    assert one == pytest.approx(both, abs=1e-5)
    one, both = gdpo(batch, weights={}, epsilon=EPSILON)[[1, 3]].tolist()
    assert both == pytest.approx(2 * one, abs=1e-5)


EVERY = [pair[0] for pair in PAIRS.values()] + [reinforce_pp_baseline]


@pytest.mark.parametrize("advantage", EVERY)
def test_edges(advantage, make_batch):
    """One sample, and rewards that are all equal, as far as rounding tells: nothing to learn, and no NaN."""
    for rewards in ([1.0], [0.1] * 5, [0.0] * 3, [-1.0] * 3, [1e6] * 4):
        groups = [0] * len(rewards)
        found = advantage(make_batch(rewards, groups))
        assert found.dtype == torch.float32
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) < 1e-4


def test_max_rl_weighs_hard_prompts_up(make_batch):
    """One right answer of n earns n - 1, a wrong one -1, whatever the share of right ones; none right earns nothing."""
    batch = make_batch([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 2, 2])
    assert max_rl(batch).tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("k", "right", "size"), [(2, 1, 4), (3, 2, 6), (4, 3, 8), (8, 1, 8)])
def test_a_right_answer_earns_the_chance_that_its_k_minus_1_siblings_are_all_wrong(k, right, size, make_batch):
    batch = make_batch([1.0] * right + [0.0] * (size - right), [0] * size)
    chance = math.comb(size - right, k - 1) / math.comb(size - 1, k - 1)
    assert pass_at_k(batch, k=k).tolist() == pytest.approx([chance] * right + [0.0] * (size - right))


def test_pass_at_the_whole_group_is_the_best_reward_less_the_second_best(make_batch):
    """As verl's `grpo_passk` without its division by the standard deviation; two best answers earn nothing."""
    batch = make_batch([0.3, 0.9, 0.5, 0.1, 0.7, 0.2, 0.7], [0, 0, 0, 0, 1, 1, 1])
    assert pass_at_k(batch, k=None).tolist() == pytest.approx([0.0, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_the_expected_gradient_is_that_of_max_at_k(make_batch):
    """Three answers with probabilities p, groups of 3, k = 2: all 27 groups against autograd of E[max R] in float64."""
    logits = torch.tensor([0.2, -0.4, 0.7], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1.0, 0.25], dtype=torch.float64)
    probabilities = logits.softmax(0)
    best = torch.maximum(rewards[:, None], rewards)
    (exact,) = torch.autograd.grad((probabilities[:, None] * probabilities * best).sum(), logits)
    estimated = torch.zeros(3, dtype=torch.float64)
    for answers in itertools.product(range(3), repeat=3):
        batch = make_batch(rewards[list(answers)].tolist(), [0] * 3)
        scores = torch.eye(3, dtype=torch.float64)[list(answers)] - probabilities.detach()
        mean_gradient = (pass_at_k(batch, k=2).double()[:, None] * scores).mean(0)
        estimated += probabilities.detach()[list(answers)].prod() * mean_gradient
    torch.testing.assert_close(estimated, exact / 2, rtol=1e-6, atol=1e-8)
