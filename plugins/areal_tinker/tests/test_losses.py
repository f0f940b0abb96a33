"""The losses against their formulas, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from sample_terms import ROWS, make

from areal_tinker.errors import RequestError
from areal_tinker.losses import LOSSES, Terms, find_loss, total


def by_hand(name, terms):
    """Return value and gradient with respect to each log-probability, by scalar arithmetic."""
    p, q = terms.logprobs.tolist(), terms.inputs["logprobs"].tolist()
    advantages, weights = terms.inputs["advantages"].tolist(), terms.inputs["weights"].tolist()
    low, high = terms.settings.get("clip_low_threshold", 0.8), terms.settings.get("clip_high_threshold", 1.2)
    value, gradient = 0.0, []
    for token, row in enumerate(ROWS.tolist()):
        a, ratio = advantages[token], math.exp(p[token] - q[token])
        if name == "gspo":
            members = [t for t in range(8) if ROWS[t] == row and terms.inputs["sequence_ratio_mask"][t]]
            ratio = math.exp(sum(p[t] - q[t] for t in members) / len(members))
        clipped = min(max(ratio, low), high)
        if name == "cross_entropy":
            loss, slope = -weights[token] * p[token], -weights[token]
        elif name == "importance_sampling":
            loss, slope = -ratio * a, -ratio * a
        elif name in {"ppo", "gspo"}:
            is_clipped = clipped * a < ratio * a
            loss, slope = -min(ratio * a, clipped * a), 0.0 if is_clipped else -ratio * a
        elif name == "cispo":
            loss, slope = -clipped * a * p[token], -clipped * a
        else:
            beta = terms.settings.get("beta", 0.05)
            distance = p[token] - q[token]
            loss, slope = -(p[token] * a - beta / 2 * distance**2), -(a - beta * distance)
        value += loss
        gradient.append(slope)
    return value, gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_is_its_formula(name, seed):
    own = {"ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}, "dro": {"beta": 0.3}}
    for settings in ({}, own.get(name, {})):
        terms = make(seed, **settings)
        loss = total(LOSSES[name], terms)
        loss.backward()
        value, gradient = by_hand(name, terms)
        assert float(loss.detach()) == pytest.approx(value, abs=1e-6)
        assert terms.logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_masked_tokens_have_no_loss_whatever_their_values():
    terms = make()
    inputs = {**terms.inputs, "mask": torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 0])}
    inputs["logprobs"] = inputs["logprobs"].where(inputs["mask"] != 0, -1e4)
    loss = total(LOSSES["ppo"], Terms(terms.logprobs, inputs, {}, ROWS, 3))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(terms.logprobs.grad).all()
    assert terms.logprobs.grad[[1, 7]].tolist() == [0, 0]


def test_bounds_may_be_given_for_each_token():
    terms = make(1)
    bounds = {"clip_low_threshold": torch.full((8,), 0.8), "clip_high_threshold": torch.full((8,), 1.2)}
    each = Terms(terms.logprobs, {**terms.inputs, **bounds}, {}, ROWS, 3)
    assert total(LOSSES["ppo"], each).item() == total(LOSSES["ppo"], terms).item()


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "message"),
    [
        ("ppo", {"logprobs"}, set(), "loss_fn_inputs lacks advantages, which the loss 'ppo' needs"),
        ("cross_entropy", {"weights", "advantages"}, set(), "does not read the loss_fn_inputs advantages"),
        ("dro", {"logprobs", "advantages"}, {"betta"}, "has no setting betta in loss_fn_config; it has beta"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(name, inputs, settings, message):
    with pytest.raises(RequestError, match=message):
        find_loss(name).check(name, frozenset(inputs), frozenset(settings))


def test_the_loss_without_a_published_formula_is_named():
    with pytest.raises(RequestError, match="no loss 'stable_reinforce', whose formula is not published"):
        find_loss("stable_reinforce")
