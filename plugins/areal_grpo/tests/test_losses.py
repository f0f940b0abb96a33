"""Losses against scalar loops that are written from the papers, values and gradients."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_grpo import losses, sequence_losses, weighted_losses
from areal_grpo.loss_settings import (
    CISPOLossSettings,
    DPPOLossSettings,
    GMPOLossSettings,
    GSPOLossSettings,
    PPOClipSettings,
    RolloutImportanceSettings,
    SAPOLossSettings,
    VESPOLossSettings,
)
from areal_grpo.losses import ppo_clip, reinforce

CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
CASES = {
    "ppo_clip": (losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}),
    "ppo_clip, dual": (losses.ppo_clip, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.7}),
    "sapo": (losses.sapo, {"temperature_positive": 1.0, "temperature_negative": 1.05}),
    "sapo, far apart": (losses.sapo, {"temperature_positive": 0.5, "temperature_negative": 3.0}),
    "reinforce": (losses.reinforce, {}),
    "gspo": (sequence_losses.gspo, {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo, wide": (sequence_losses.gspo, {"clip_low": 0.3, "clip_high": 0.6}),
    "gmpo": (sequence_losses.gmpo, {"clip_low": 0.4, "clip_high": 0.4}),
    "gmpo, bounds of their own": (sequence_losses.gmpo, {"clip_low": 0.2, "clip_high": 0.7}),
    "cispo": (weighted_losses.cispo, {"clip_low": 1.0, "clip_high": 4.0}),
    "cispo, tight": (weighted_losses.cispo, {"clip_low": 0.3, "clip_high": 0.5}),
    "dppo": (
        weighted_losses.dppo,
        {"divergence": "tv", "threshold_low": 0.15, "threshold_high": 0.2, "cap": 20.0},
    ),
    "dppo, kl": (
        weighted_losses.dppo,
        {"divergence": "kl", "threshold_low": 0.05, "threshold_high": 0.1, "cap": 3.0},
    ),
    "rollout_importance": (weighted_losses.rollout_importance, {"clip_low": 0.2, "clip_high": 0.28}),
    "rollout_importance, unbounded": (weighted_losses.rollout_importance, {"clip_low": None, "clip_high": None}),
    "vespo": (
        weighted_losses.vespo,
        {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    ),
    "vespo, soft": (
        weighted_losses.vespo,
        {"k_positive": 0.5, "lambda_positive": 0.3, "k_negative": 1.0, "lambda_negative": 0.2},
    ),
}
DEFAULTS = {
    "ppo_clip": PPOClipSettings,
    "sapo": SAPOLossSettings,
    "reinforce": dict,
    "gspo": GSPOLossSettings,
    "gmpo": GMPOLossSettings,
    "cispo": CISPOLossSettings,
    "dppo": DPPOLossSettings,
    "rollout_importance": RolloutImportanceSettings,
    "vespo": VESPOLossSettings,
}
LOGPROBS = st.floats(-4, -0.01)
TOKEN = st.tuples(st.booleans(), LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-2, 2))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=4)
each_loss = pytest.mark.parametrize("name", CASES)


def by_loop(loop, sequences, settings, loops):
    """Losses and derivatives of the tokens that are learned from, sequence by sequence."""
    found = []
    for sequence in sequences:
        tokens = [loops.Token(*token[1:]) for token in sequence if token[0]]
        found += loop(tokens, **settings) if tokens else []
    return found


@pytest.mark.slow
@each_loss
@given(sequences=SEQUENCES)
def test_the_loop_of_the_paper(name, sequences, make_sequences, loops):
    component, settings = CASES[name]
    terms = make_sequences(sequences)
    found, logged = component(terms, **settings)
    assert found.dtype == torch.float64
    torch.where(terms.mask, found, 0.0).sum().backward()
    expected = by_loop(getattr(loops, component.__name__), sequences, settings, loops)
    values = torch.tensor([value for value, _ in expected], dtype=torch.float64)
    slopes = torch.tensor([slope for _, slope in expected], dtype=torch.float64)
    torch.testing.assert_close(found.detach()[terms.mask], values, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(terms.logprobs.grad[terms.mask], slopes, rtol=1e-10, atol=1e-10)
    assert not terms.logprobs.grad[~terms.mask].any()
    if "clip_fraction" in logged:
        parts = logged["clip_fraction_positive"] + logged["clip_fraction_negative"]
        has_advantage = terms.mask & (terms.advantages != 0)
        assert torch.equal(parts[has_advantage], logged["clip_fraction"][has_advantage])


@pytest.mark.parametrize("name", DEFAULTS)
def test_float32_is_as_good_as_its_digits(name, loops, make_sequences):
    """The defaults, on values that a run has."""
    component, settings = CASES[name][0], dict(DEFAULTS[name]())
    generator = torch.Generator().manual_seed(3)
    sequences = [
        [(True, -x, -x - 0.2 * y, -x - 0.3 * z, a) for x, y, z, a in torch.rand(50, 4, generator=generator).tolist()]
        for _ in range(3)
    ]
    terms = make_sequences(sequences)
    columns = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")
    single = type(terms)(
        *(getattr(terms, key).detach().float() for key in columns), terms.mask, terms.row_index, terms.rows
    )
    single.logprobs.requires_grad_()
    found, _ = component(single, **settings)
    found.sum().backward()
    expected = torch.tensor(by_loop(getattr(loops, name), sequences, settings, loops))
    torch.testing.assert_close(found.detach(), expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.logprobs.grad, expected[:, 1], rtol=1e-5, atol=1e-5)


def geometric_mean(tokens, advantage, clip):
    """GMPO of a whole answer, arXiv 2507.20673, as the paper writes it: powers of ratios with the advantage's sign."""
    sign, product = (1 if advantage > 0 else -1), 1.0
    for logprob, proximal in tokens:
        power = math.exp(logprob - proximal) ** sign
        clipped = min(max(power, math.exp(-clip)), math.exp(clip))
        product *= min(power, clipped) ** sign
    return -(product ** (1 / len(tokens))) * advantage


def sequence_ratio(tokens, advantage, low, high):
    """GSPO of a whole answer, arXiv 2507.18071, equations 5 and 7."""
    ratio = math.prod(math.exp(logprob - proximal) for logprob, proximal in tokens) ** (1 / len(tokens))
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@pytest.mark.parametrize("advantage", [0.7, -1.3])
@pytest.mark.parametrize("shift", [-0.9, -0.02, 0.0, 0.3])
@pytest.mark.parametrize("kind", ["gspo", "gmpo"])
def test_the_mean_over_a_sequence_is_the_loss_of_the_whole_answer(kind, shift, advantage, make_sequences):
    """Its gradient is that of the sequence's own loss, here by differences."""
    proximal = [-1.2, -0.3, -2.2, -0.9]
    tokens = [(value + shift + 0.3 * place, value) for place, value in enumerate(proximal)]
    terms = make_sequences([[(True, logprob, value, 0.0, advantage) for logprob, value in tokens]])
    if kind == "gspo":
        found, _ = sequence_losses.gspo(terms, clip_low=0.3, clip_high=0.4)
        whole = partial(sequence_ratio, advantage=advantage, low=0.3, high=0.4)
    else:
        found, _ = sequence_losses.gmpo(terms, clip_low=0.35, clip_high=0.35)
        whole = partial(geometric_mean, advantage=advantage, clip=0.35)
    found.mean().backward()
    assert found.mean().item() == pytest.approx(whole(tokens), abs=1e-12)
    for place, (logprob, value) in enumerate(tokens):
        near = [[*tokens[:place], (logprob + step, value), *tokens[place + 1 :]] for step in (1e-5, -1e-5)]
        slope = (whole(near[0]) - whole(near[1])) / 2e-5
        assert terms.logprobs.grad[place].item() == pytest.approx(slope, abs=1e-8)


def test_bounds_of_their_own_for_each_side(make_terms):
    ratios, advantages = [0.7, 0.7, 1.35, 1.35, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0]
    terms = make_terms([math.log(ratio) for ratio in ratios], [0.0] * 5, [9.0] * 5, advantages)
    found, logged = ppo_clip(terms, clip_low=0.1, clip_high=0.3, dual_clip=None)
    assert found.tolist() == pytest.approx([-0.7, 0.9, -1.3, 1.35, -2.0])
    assert logged["clip_fraction"].tolist() == [0, 1, 1, 0, 0]
    assert logged["clip_fraction_positive"].tolist() == [0, 0, 1, 0, 0]
    assert logged["clip_fraction_negative"].tolist() == [0, 1, 0, 0, 0]
    assert "dual_clip_fraction" not in logged


def test_the_dual_bound_is_told(make_terms):
    terms = make_terms([math.log(4.0), math.log(2.0)], [0.0] * 2, [0.0] * 2, [-1.0, -1.0])
    found, logged = ppo_clip(terms, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert found.tolist() == pytest.approx([3.0, 2.0])
    assert logged["dual_clip_fraction"].tolist() == [1, 0]


@pytest.mark.parametrize("name", ["ppo_clip", "sapo", "gspo", "gmpo", "cispo"])
def test_the_ratio_is_to_the_proximal_policy_whoever_sampled(name, make_terms):
    component, settings = CASES[name]
    one = component(make_terms([-1.0], [-1.1], [-1.1], [1.0]), **settings)[0]
    other = component(make_terms([-1.0], [-1.1], [-7.0], [1.0]), **settings)[0]
    assert one.item() == other.item()


@pytest.mark.parametrize("name", ["dppo", "dppo, kl", "rollout_importance", "vespo"])
def test_the_ratio_is_to_the_policy_that_sampled_whatever_the_proximal_one(name, make_terms):
    component, settings = CASES[name]
    one = component(make_terms([-1.0], [-1.1], [-1.1], [1.0]), **settings)[0]
    other = component(make_terms([-1.0], [-7.0], [-1.1], [1.0]), **settings)[0]
    assert one.item() == other.item() != 0


def test_rare_tokens_stay_within_the_trust_region_of_dppo(make_terms):
    """Ratios of 4 and 1/4: PPO clips both; DPPO only where the probability itself has moved."""
    columns = [math.log(p) for p in (4e-4, 0.8, 1e-4, 0.2)], None, [math.log(p) for p in (1e-4, 0.2, 4e-4, 0.8)]
    terms = make_terms(*columns, [1.0, 1.0, -1.0, -1.0])
    for name in ("dppo", "dppo, kl"):
        _, logged = CASES[name][0](terms, **CASES[name][1])
        assert logged["clip_fraction"].tolist() == [0, 1, 0, 1]


@pytest.mark.slow
@each_loss
@given(tokens=st.lists(st.tuples(LOGPROBS, st.floats(-2, 2)), min_size=1, max_size=8))
def test_on_policy_every_loss_has_the_gradient_of_the_policy(name, tokens, make_terms):
    component, settings = CASES[name]
    logprobs, advantages = (list(column) for column in zip(*tokens, strict=True))
    terms = make_terms(logprobs, None, logprobs, advantages)
    found, logged = component(terms, **settings)
    assert not logged.get("clip_fraction", torch.zeros(1)).any()
    found.sum().backward()
    torch.testing.assert_close(terms.logprobs.grad, -terms.advantages)


@each_loss
@pytest.mark.parametrize("distance", [25.0, 200.0, 1e4, math.inf])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_log_ratios_far_apart_overflow_nowhere(name, distance, sign, advantage, make_terms):
    component, settings = CASES[name]
    here, there = (0.0, -distance) if sign > 0 else (-distance, 0.0)
    terms = make_terms([max(here, -1e4)], [there], [there], [advantage])
    found, logged = component(terms, **settings)
    found.sum().backward()
    assert found.isfinite().all()
    assert terms.logprobs.grad.isfinite().all()
    assert all(value.isfinite().all() for value in logged.values())
    if "ratio" in logged and name != "gmpo":
        assert logged["ratio"].item() <= math.exp(20) * 1.001


@each_loss
def test_what_stands_outside_the_mask_reaches_no_gradient(name, make_terms):
    component, settings = CASES[name]
    terms = make_terms([-1.0, -math.inf], [-1.2, -math.inf], [-1.0, math.nan], [1.0, 1.0], [True, False])
    found, _ = component(terms, **settings)
    torch.where(terms.mask, found, 0.0).sum().backward()
    assert terms.logprobs.grad[1] == 0
    assert terms.logprobs.grad.isfinite().all()


def test_vespo_weighs_by_the_product_of_ratios_and_needs_no_clipping(make_sequences):
    """By hand: ratios 2 and 2 have W = 4, and φ(4) = 4^2 e^-9 if A > 0, 4^3 e^-6 if A < 0; 1/2 alone has W = 1/2."""
    log2 = math.log(2.0)
    far = [(True, -1.0, 0.0, -1.0 - log2, 1.0), (False, -9.0, 0.0, -1.0, 1.0), (True, -2.0, 0.0, -2.0 - log2, -1.0)]
    terms = make_sequences([far, [(True, -1.0, 0.0, -1.0 + log2, 0.0)]])
    settings = dict(VESPOLossSettings())
    losses, logged = weighted_losses.vespo(terms, **settings)
    gates = [16 * math.exp(-9), 64 * math.exp(-6), 0.25 * math.exp(1.5)]
    assert logged["gate"][terms.mask].tolist() == pytest.approx(gates)
    assert losses[terms.mask].tolist() == pytest.approx([gates[0], -2 * gates[1], 0.0])
    losses[terms.mask].sum().backward()
    assert terms.logprobs.grad.tolist() == pytest.approx([-gates[0], 0.0, gates[1], 0.0])


def test_reinforce(make_terms):
    found, _ = reinforce(make_terms([-0.5, -2.0], None, [0.0, 0.0], [2.0, -1.0]))
    assert found.tolist() == [1.0, -2.0]
