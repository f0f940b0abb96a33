"""DPO and IPO against loops by index, and against the formulas that TRL publishes, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from areal_finetuning.preferences import preference_losses
from areal_testing.conformance import numbers_of

CASES = [
    {"loss": "sigmoid", "beta": 0.1},
    {"loss": "sigmoid", "beta": 0.5, "label_smoothing": 0.15},
    {"loss": "sigmoid", "beta": 2.0, "length_normalized": True},
    {"loss": "sigmoid", "beta": 0.3, "reference_free": True, "label_smoothing": 0.4},
    {"loss": "ipo", "beta": 0.1},
    {"loss": "ipo", "beta": 0.7, "length_normalized": True},
    {"loss": "ipo", "beta": 0.2, "reference_free": True},
]
ids = pytest.mark.parametrize("settings", CASES, ids=lambda each: "-".join(f"{k}={v}" for k, v in each.items()))


def by_index(batch, logprobs, *, loss, beta, label_smoothing=0.0, length_normalized=False, reference_free=False):
    """The mean loss of the pairs and the two rewards of each, number by number; autograd only of `logprobs`."""
    offsets = batch.tokens.offsets.tolist()
    losses, rewards = [], []
    for rows in batch.unit_rows:
        ratio = {}
        for row in rows:
            total, count = torch.zeros((), dtype=torch.float64), 0
            for t in range(offsets[row], offsets[row + 1]):
                if bool(batch["loss_mask"][t]):
                    total = total + logprobs[t]
                    if not reference_free:
                        total = total - batch["reference_logprobs"][t]
                    count += 1
            if length_normalized and count:
                total = total / count
            ratio[bool(batch["is_chosen"][row])] = total
        h = ratio[True] - ratio[False]
        if loss == "ipo":
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            right, wrong = 1 / (1 + torch.exp(-beta * h)), 1 / (1 + torch.exp(beta * h))
            losses.append(-(1 - label_smoothing) * torch.log(right) - label_smoothing * torch.log(wrong))
        rewards.append((float(beta * ratio[True].detach()), float(beta * ratio[False].detach())))
    return sum(losses) / len(losses), rewards


def logprobs_of(batch, distance=1.0):
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(batch.token_count, generator=generator, dtype=torch.float64)
    return (batch["reference_logprobs"] + distance * noise).requires_grad_()


@ids
@pytest.mark.parametrize("distance", [0.1, 3.0])
def test_loss_and_gradient_are_those_of_the_loop(settings, distance, pairs, build, one_update):
    logprobs = logprobs_of(pairs, distance)
    wanted, rewards = by_index(pairs, logprobs, **settings)
    (gradient,) = torch.autograd.grad(wanted, logprobs)
    (work,) = one_update(build("algorithms", "dpo", **settings), pairs)
    result = work.loss(work.batch, {"logprobs": logprobs})
    (found,) = torch.autograd.grad(result.loss, logprobs)
    assert result.loss.dtype == torch.float64
    assert float(result.loss) == pytest.approx(float(wanted), abs=1e-12, rel=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    numbers = numbers_of(result.metrics)
    assert numbers["chosen_reward"] == pytest.approx(sum(c for c, _ in rewards) / 4, abs=1e-12)
    assert numbers["rejected_reward"] == pytest.approx(sum(r for _, r in rewards) / 4, abs=1e-12)
    assert numbers["margin"] == pytest.approx(sum(c - r for c, r in rewards) / 4, abs=1e-12)
    assert numbers["accuracy"] == sum(c > r for c, r in rewards) / 4


@ids
def test_in_float32_it_is_the_same_to_1e_5(settings, pairs, build, one_update):
    logprobs = logprobs_of(pairs)
    wanted, _ = by_index(pairs, logprobs, **settings)
    (gradient,) = torch.autograd.grad(wanted, logprobs)
    single = pairs.with_tokens(reference_logprobs=pairs["reference_logprobs"].float())
    (work,) = one_update(build("algorithms", "dpo", **settings), single)
    given_logprobs = logprobs.detach().float().requires_grad_()
    result = work.loss(work.batch, {"logprobs": given_logprobs})
    (found,) = torch.autograd.grad(result.loss, given_logprobs)
    assert result.loss.dtype == found.dtype == torch.float32
    assert float(result.loss) == pytest.approx(float(wanted), rel=1e-5)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-5)


def trl_losses(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, *, kind, beta, smoothing=0.0):
    """What TRL's DPO trainer computes from the summed (in its IPO: averaged) log-probabilities of both sides."""
    logits = (chosen_logps - rejected_logps) - (ref_chosen_logps - ref_rejected_logps)
    if kind == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    return -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_the_losses_are_those_of_trl(kind, smoothing):
    generator = torch.Generator().manual_seed(3)
    sides = [(-40 * torch.rand(64, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(4)]
    wanted = trl_losses(*sides, kind=kind, beta=0.1, smoothing=smoothing)
    chosen, rejected, reference_chosen, reference_rejected = sides
    h = (chosen - reference_chosen) - (rejected - reference_rejected)
    found = preference_losses(h, loss=kind, beta=0.1, label_smoothing=smoothing)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found.sum(), sides, retain_graph=True),
        torch.autograd.grad(wanted.sum(), sides),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_that_of_the_paper():
    """-β σ(-β h) towards h (arXiv 2305.18290, below equation 7), and 2 (h - 1 / (2β)) for IPO."""
    h = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    dpo = preference_losses(h, loss="sigmoid", beta=0.1, label_smoothing=0.0)
    torch.testing.assert_close(torch.autograd.grad(dpo.sum(), h)[0], -0.1 * torch.sigmoid(-0.1 * h.detach()))
    ipo = preference_losses(h, loss="ipo", beta=0.1, label_smoothing=0.0)
    torch.testing.assert_close(torch.autograd.grad(ipo.sum(), h)[0], 2 * (h.detach() - 5))


@given(st.floats(-1e4, 1e4), st.floats(0.01, 10), st.floats(0, 0.49), st.sampled_from(["sigmoid", "ipo"]))
def test_losses_are_finite_and_have_their_bottom_where_the_papers_say(h, beta, smoothing, kind):
    smoothing = 0.0 if kind == "ipo" else smoothing
    value = torch.tensor([h], dtype=torch.float64, requires_grad=True)
    loss = preference_losses(value, loss=kind, beta=beta, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert bool(loss.isfinite())
    assert float(loss) >= 0
    # A conservative label is believed up to log((1 - ε) / ε) / β; an honest one without end.
    bottom = (
        1 / (2 * beta) if kind == "ipo" else math.log((1 - smoothing) / smoothing) / beta if smoothing else math.inf
    )
    if abs(h - bottom) > 1e-6 * max(1.0, abs(bottom)):
        assert float(gradient) <= 0 if h < bottom else float(gradient) >= 0


def test_what_is_infinite_outside_of_the_mask_stays_outside(pairs, build, one_update):
    outside = ~pairs["loss_mask"]
    (work,) = one_update(build("algorithms", "dpo"), pairs)
    clean = logprobs_of(pairs)
    wanted = work.loss(work.batch, {"logprobs": clean})
    wanted.loss.backward()
    spoiled = clean.detach().masked_fill(outside, -math.inf).requires_grad_()
    result = work.loss(work.batch, {"logprobs": spoiled})
    result.loss.backward()
    assert float(result.loss) == float(wanted.loss)
    assert torch.equal(spoiled.grad, clean.grad)
    assert numbers_of(result.metrics) == numbers_of(wanted.metrics)


def test_at_the_start_nothing_is_decided(pairs, build, one_update):
    """The policy is the reference: log 2, no margin, and every tie counts half."""
    (work,) = one_update(build("algorithms", "dpo"), pairs)
    result = work.loss(work.batch, {"logprobs": pairs["reference_logprobs"]})
    assert float(result.loss) == pytest.approx(math.log(2))
    numbers = numbers_of(result.metrics)
    assert (numbers["accuracy"], numbers["margin"]) == (0.5, 0.0)


def test_several_updates_each_weigh_their_own_pairs(pairs, build, one_update):
    works = one_update(build("algorithms", "dpo"), pairs, num_minibatches=2)
    assert [len(work.batch) for work in works] == [4, 4]
    assert all(work.batch["pair_weights"].tolist() == [0.5, 0.5] for work in works)


def test_a_batch_without_pairs_is_refused(pairs, build, one_update):
    algorithm = build("algorithms", "dpo")
    with pytest.raises(ValueError, match="two sequences a row, with the column is_chosen"):
        one_update(algorithm, pairs.with_units(None))
    with pytest.raises(ValueError, match="one chosen and one rejected sequence; this unit has 2 and 0"):
        one_update(algorithm, pairs.with_sequences(is_chosen=torch.ones(8, dtype=torch.bool)))
    with pytest.raises(ValueError, match="this unit has 1 and 2"):
        one_update(algorithm, pairs.select([0, 1, 2, 3, 4, 5]).with_units(torch.tensor([0, 0, 1, 0, 1, 1])))
