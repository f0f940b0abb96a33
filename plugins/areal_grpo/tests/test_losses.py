"""Losses and corrections against scalar loops that are written from the papers, values and gradients."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_grpo.corrections import token_mask, token_truncate
from areal_grpo.losses import ppo_clip, reinforce

CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
LOSSES = (partial(ppo_clip, **CLIPS), reinforce)
CORRECTIONS = (partial(token_truncate, cap=2.0), partial(token_mask, low=0.5, high=5.0))
LOGPROBS = st.floats(-4, 0)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-2, 2)), min_size=1, max_size=8)


def naive_clip(logprob, proximal, advantage, low, high, dual):
    """Loss of a token, its derivative by `logprob`, and whether clipping and the dual bound are at work."""
    ratio = math.exp(logprob - proximal)
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective, clipped = ratio * advantage, bounded * advantage < ratio * advantage
    gradient = -advantage * ratio
    if clipped:
        objective, gradient = bounded * advantage, 0.0
    over = dual is not None and advantage < 0 and objective < dual * advantage
    if over:
        objective, gradient = dual * advantage, 0.0
    return -objective, gradient, clipped, over


@pytest.mark.parametrize("dual", [None, 1.5])
@given(tokens=TOKENS)
def test_ppo_clip_token_by_token(dual, tokens, make_terms):
    low, high = 0.2, 0.3
    # At a kink the derivative is anything between those of both sides: keep clear of it.
    kinks = [1 - low, 1 + high, *([dual] if dual else [])]
    tokens = [t for t in tokens if all(abs(math.exp(t[0] - t[1]) - kink) > 1e-6 for kink in kinks)]
    if not tokens:
        return
    terms = make_terms(*(list(column) for column in zip(*tokens, strict=True)))
    losses, logged = ppo_clip(terms, clip_low=low, clip_high=high, dual_clip=dual)
    losses.sum().backward()
    naive = [naive_clip(logprob, proximal, a, low, high, dual) for logprob, proximal, _, a in tokens]
    torch.testing.assert_close(losses.detach(), torch.tensor([n[0] for n in naive], dtype=torch.float64))
    torch.testing.assert_close(terms.logprobs.grad, torch.tensor([n[1] for n in naive], dtype=torch.float64))
    assert logged["clip_fraction"].tolist() == [float(n[2]) for n in naive]
    torch.testing.assert_close(logged["ratio"], (terms.logprobs.detach() - terms.proximal_logprobs).exp())
    if dual:
        assert logged["dual_clip_fraction"].tolist() == [float(n[3]) for n in naive]
    else:
        assert "dual_clip_fraction" not in logged


def test_bounds_of_their_own_for_each_side(make_terms):
    ratios, advantages = [0.7, 0.7, 1.35, 1.35, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0]
    terms = make_terms([math.log(ratio) for ratio in ratios], [0.0] * 5, [9.0] * 5, advantages)
    losses, logged = ppo_clip(terms, clip_low=0.1, clip_high=0.3, dual_clip=None)
    assert losses.tolist() == pytest.approx([-0.7, 0.9, -1.3, 1.35, -2.0])
    assert logged["clip_fraction"].tolist() == [0, 1, 1, 0, 0]


def test_the_ratio_is_to_the_proximal_policy_whoever_sampled(make_terms):
    one = ppo_clip(make_terms([-1.0], [-1.1], [-1.1], [1.0]), **CLIPS)[0]
    other = ppo_clip(make_terms([-1.0], [-1.1], [-7.0], [1.0]), **CLIPS)[0]
    assert one.item() == other.item() == pytest.approx(-math.exp(0.1))


@given(tokens=TOKENS)
def test_on_the_proximal_policy_every_loss_has_the_gradient_of_the_policy(tokens, make_terms):
    columns = [list(column) for column in zip(*tokens, strict=True)]
    gradients = []
    for loss in LOSSES:
        terms = make_terms(columns[0], None, *columns[2:])
        losses, logged = loss(terms)
        assert not logged.get("clip_fraction", torch.zeros(1)).any()
        losses.sum().backward()
        gradients.append(terms.logprobs.grad)
    torch.testing.assert_close(gradients[0], -terms.advantages)
    torch.testing.assert_close(gradients[1], -terms.advantages)


def test_reinforce(make_terms):
    losses, _ = reinforce(make_terms([-0.5, -2.0], None, [0.0, 0.0], [2.0, -1.0]))
    assert losses.tolist() == [1.0, -2.0]


@given(tokens=TOKENS)
def test_corrections_token_by_token(tokens, make_terms):
    terms = make_terms(*(list(column) for column in zip(*tokens, strict=True)))
    ratios = [math.exp(proximal - behaviour) for _, proximal, behaviour, _ in tokens]
    weights, logged = token_truncate(terms, cap=1.5)
    assert weights.tolist() == pytest.approx([min(ratio, 1.5) for ratio in ratios])
    assert logged["truncated_fraction"].tolist() == [float(ratio > 1.5) for ratio in ratios]
    assert logged["behaviour_weight"].tolist() == weights.tolist()
    assert not weights.requires_grad
    weights, logged = token_mask(terms, low=0.5, high=2.0)
    assert weights.tolist() == pytest.approx([ratio if 0.5 <= ratio <= 2 else 0 for ratio in ratios])
    assert logged["masked_fraction"].tolist() == [float(not 0.5 <= ratio <= 2) for ratio in ratios]
    assert logged["behaviour_weight"].tolist() == weights.tolist()
    assert not weights.requires_grad


def test_a_correction_in_a_single_update_carries_no_gradient(make_terms):
    """There the proximal policy is the current one."""
    terms = make_terms([-1.0, -2.0], None, [-1.5, -0.2], [1.0, 1.0])
    for correction in CORRECTIONS:
        assert not correction(terms)[0].requires_grad


@pytest.mark.parametrize("distance", [25.0, 200.0, 1e4, math.inf])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_far_apart_overflow_nowhere(distance, sign, advantage, make_terms):
    terms = make_terms([sign * distance], [0.0], [0.0], [advantage])
    losses, logged = ppo_clip(terms, **CLIPS)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert terms.logprobs.grad.isfinite().all()
    assert logged["ratio"].item() == pytest.approx(math.exp(20 * sign))
    terms = make_terms([0.0], [sign * distance], [0.0], [advantage])
    assert token_truncate(terms, cap=2.0)[0].item() == pytest.approx(2.0 if sign > 0 else math.exp(-20))
    assert token_mask(terms, low=0.5, high=5.0)[0].item() == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_what_stands_outside_the_mask_reaches_no_gradient(loss, make_terms):
    terms = make_terms([-1.0, -math.inf], [-1.2, -math.inf], [-1.0, math.nan], [1.0, 1.0], [True, False])
    losses, _ = loss(terms)
    torch.where(terms.mask, losses, 0.0).sum().backward()
    assert terms.logprobs.grad[1] == 0
    assert terms.logprobs.grad.isfinite().all()
    for correction in CORRECTIONS:
        assert correction(terms)[0].isfinite().all()
