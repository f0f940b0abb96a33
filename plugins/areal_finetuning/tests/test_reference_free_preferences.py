"""SimPO and ORPO against loops over pairs in Python's floats, and against values computed by hand."""

import math

import pytest
import torch

from areal_finetuning.preferences import log_odds, odds_ratio_losses, simpo_losses
from areal_testing.conformance import numbers_of

CASES = [
    ("simpo", {"beta": 2.0, "gamma": 1.0}),
    ("simpo", {"beta": 0.1, "gamma": 0.5}),
    ("simpo", {"beta": 2.5, "gamma": 0.0}),
    ("orpo", {"weight": 0.1}),
    ("orpo", {"weight": 1.5}),
]
each_case = pytest.mark.parametrize(("name", "settings"), CASES)


def mean_logprob(batch, logprobs, row):
    """The mean of the tokens of a sequence that are in the loss."""
    places = range(*batch.tokens.offsets[row : row + 2].tolist())
    learned = [logprobs[t] for t in places if bool(batch["loss_mask"][t])]
    return sum(learned) / max(len(learned), 1)


def simpo(chosen, rejected, beta, gamma):
    return math.log(1 + math.exp(gamma - beta * (chosen - rejected)))


def orpo(chosen, rejected, weight):
    odds = [p / (1 - p) for p in (math.exp(min(value, -math.exp(-20))) for value in (chosen, rejected))]
    return -chosen - weight * math.log(odds[0] / (odds[0] + odds[1]))


def by_pair(name, settings, batch, logprobs):
    losses = []
    for rows in batch.unit_rows:
        sides = {bool(batch["is_chosen"][row]): mean_logprob(batch, logprobs, row) for row in rows}
        losses.append({"simpo": simpo, "orpo": orpo}[name](sides[True], sides[False], **settings))
    return sum(losses) / len(losses)


def policy_of(batch):
    noise = torch.rand(batch.token_count, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    return -0.05 - 2 * noise


@each_case
def test_loss_and_gradient_are_those_of_the_loop(name, settings, pairs, build, one_update):
    """The loop's gradient is a central difference; the loss in float32 agrees to its digits."""
    logprobs = policy_of(pairs).requires_grad_()
    (work,) = one_update(build("algorithms", name, **settings), pairs)
    result = work.loss(work.batch, {"logprobs": logprobs})
    result.loss.backward()
    values = logprobs.detach().tolist()
    assert result.loss.item() == pytest.approx(by_pair(name, settings, pairs, values), abs=1e-12)
    for place, value in enumerate(values):
        above, below = ([*values[:place], value + step, *values[place + 1 :]] for step in (1e-5, -1e-5))
        slope = (by_pair(name, settings, pairs, above) - by_pair(name, settings, pairs, below)) / 2e-5
        assert logprobs.grad[place].item() == pytest.approx(slope, abs=1e-8)
    assert not logprobs.grad[~pairs["loss_mask"]].any()
    single = work.loss(work.batch, {"logprobs": logprobs.detach().float()})
    assert single.loss.dtype == torch.float32
    assert single.loss.item() == pytest.approx(result.loss.item(), rel=1e-5)


@each_case
def test_an_infinity_outside_the_mask_changes_nothing(name, settings, pairs, build, one_update):
    (work,) = one_update(build("algorithms", name, **settings), pairs)
    clean = policy_of(pairs).requires_grad_()
    work.loss(work.batch, {"logprobs": clean}).loss.backward()
    spoiled = clean.detach().masked_fill(~pairs["loss_mask"], -math.inf).requires_grad_()
    work.loss(work.batch, {"logprobs": spoiled}).loss.backward()
    assert torch.equal(spoiled.grad, clean.grad)


def test_simpo_has_the_values_and_slopes_of_its_formula():
    """By hand: margins 0.5, 0, -1 of mean log-probabilities with β = 2 and γ = 1 give log(1 + e^0), e^1, e^3."""
    chosen = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    losses = simpo_losses(chosen, rejected, beta=2.0, gamma=1.0)
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.e), math.log(1 + math.e**3)], abs=1e-12)
    losses.sum().backward()
    slopes = [-2 / (1 + math.exp(-argument)) for argument in (0.0, 1.0, 3.0)]
    assert chosen.grad.tolist() == pytest.approx(slopes, abs=1e-12)


def test_orpo_has_the_values_and_slopes_of_its_formula():
    """By hand: odds of 3 and 1 give log(4 / 3); d log odds / d log p = 1 / (1 - p), so the slope is -(1/4) / (1/4)."""
    chosen = torch.tensor([math.log(0.75), math.log(0.5)], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([math.log(0.5), math.log(0.8)], dtype=torch.float64)
    losses = odds_ratio_losses(chosen, rejected)
    assert losses.tolist() == pytest.approx([math.log(4 / 3), math.log(5)], abs=1e-12)
    losses.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-1.0, -1.6], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_certain_and_impossible_answers_are_finite(dtype):
    values = torch.tensor([0.0, -1e-12, -1e-6, -30.0, -1e4], dtype=dtype, requires_grad=True)
    found = log_odds(values)
    assert found.tolist() == pytest.approx([20.0, 20.0, 6 * math.log(10), -30.0, -1e4], rel=1e-5)
    (odds_ratio_losses(found, found.flip(0)) * 0).sum().backward()
    assert values.grad.isfinite().all()


def test_orpo_logs_what_it_trades_off(pairs, build, one_update):
    (work,) = one_update(build("algorithms", "orpo", weight=0.5), pairs)
    numbers = numbers_of(work.loss(work.batch, {"logprobs": policy_of(pairs)}).metrics)
    rows = [row for rows in pairs.unit_rows for row in rows if bool(pairs["is_chosen"][row])]
    mean = sum(float(mean_logprob(pairs, policy_of(pairs), row)) for row in rows) / 4
    assert numbers["negative_log_likelihood"] == pytest.approx(-mean)
    assert numbers["chosen_reward"] == pytest.approx(0.5 * mean)
    assert math.isfinite(numbers["log_odds_ratio"])
