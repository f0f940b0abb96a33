"""Whole algorithms: against TRL's padded formulas, over any split into micro-batches, and through several updates."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_core.algorithms.composition import PolicyGradient
from areal_core.config.context import ResolutionContext
from areal_core.config.sections import TrainingSection
from areal_core.data import combine
from areal_core.interfaces import PolicyTerms
from areal_core.plugins import PluginManager
from areal_core.testing.conformance import numbers_of
from areal_core.training.context import BatchContext
from areal_grpo.config import DrGRPOSettings, GRPOSettings, RLOOSettings
from areal_grpo.loss_settings import ReferenceKLSettings
from areal_grpo.regularisers import reference_kl

GROUP, LONGEST = 4, 6
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.9, 0.1, 0.2, 0.0, 0.0, 1.0, 0.0]


@pytest.fixture
def rollouts(make_batch):
    """Three groups of four; current, proximal and reference log-probabilities differ from the behaviour's."""
    lengths = [LONGEST + 1 - row % 3 for row in range(len(REWARDS))]
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], lengths=lengths, seed=3)
    generator = torch.Generator().manual_seed(4)

    def near(spread):
        return batch["logprobs"] + spread * torch.randn(batch.token_count, generator=generator)

    return batch, {"actor": near(0.4), "proximal": near(0.3), "reference": near(0.3)}


def build(settings_type, **settings):
    return PolicyGradient(
        settings_type.model_validate(settings, context=ResolutionContext(PluginManager.load(["grpo"])))
    )


class Engine:
    """A model that answers with these log-probabilities."""

    def __init__(self, logprobs):
        self._logprobs = logprobs

    def forward(self, batch, outputs):
        return {"logprobs": self._logprobs(batch) if callable(self._logprobs) else self._logprobs}


def prepared(algorithm, batch, passes, updates=2):
    """The first update's batch, of as many as there are in epochs over the whole."""
    engines = {"actor": Engine(passes["proximal"]), "reference": Engine(passes["reference"])}
    context = BatchContext(TrainingSection(epochs_per_batch=updates), engines)
    ((work, *_), *_) = algorithm.updates(algorithm.prepare(batch, context), context)
    return work.batch


def padded(batch, flat):
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(batch.lengths.tolist())), batch_first=True)


def trl_loss(batch, passes, loss_type, *, beta=0.0, cap=2.0, low=0.2, high=0.2, delta=None):
    """What TRL's GRPOTrainer minimises, on padded [B, L] tensors, with its truncated correction for vLLM."""
    logprobs = padded(batch, passes["actor"])
    old, sampled, reference = (
        padded(batch, flat) for flat in (passes["proximal"], batch["logprobs"], passes["reference"])
    )
    mask = padded(batch, batch["loss_mask"].float())
    grouped = batch["reward"].view(-1, GROUP)
    advantages = grouped - grouped.mean(1, keepdim=True)
    if loss_type != "dr_grpo":
        advantages = advantages / (grouped.std(1, keepdim=True) + 1e-6)
    advantages = advantages.flatten().unsqueeze(1)
    first = torch.exp(logprobs - old)
    second = torch.clamp(first, 1 - low, 1 + high)
    if delta is not None:
        first = torch.clamp(first, max=delta)
    each = -torch.min(first * advantages, second * advantages)
    if cap is not None:
        each = each * torch.clamp(torch.exp(old - sampled), max=cap)
    if beta:
        each = each + beta * (torch.exp(reference - logprobs) - (reference - logprobs) - 1)
    if loss_type == "grpo":
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "dr_grpo":
        return (each * mask).sum() / (len(each) * LONGEST)
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


CASES = {
    "dapo": (GRPOSettings, {}, {}),
    "grpo": (GRPOSettings, {"aggregation": "core/sequence_mean"}, {}),
    "dr_grpo": (DrGRPOSettings, {"aggregation": {"length": LONGEST}}, {}),
    "bounds of their own, another cap": (
        GRPOSettings,
        {
            "policy_loss": {"clip_high": 0.28, "clip_low": 0.1},
            "corrections": [{"type": "grpo/token_truncate", "cap": 1.1}],
        },
        {"high": 0.28, "low": 0.1, "cap": 1.1},
    ),
    "two-sided": (GRPOSettings, {"policy_loss": {"dual_clip": 1.3}}, {"delta": 1.3}),
    # TRL does not correct the penalty for stale samples, which an expectation under the policy needs: without both.
    "penalty towards a reference": (
        GRPOSettings,
        {"regularisers": ["grpo/reference_kl"], "corrections": []},
        {"beta": 0.04, "cap": None},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_trl_value_and_gradient(case, rollouts):
    settings_type, ours, theirs = CASES[case]
    batch, passes = rollouts
    algorithm = build(settings_type, **ours)
    found = passes["actor"].clone().requires_grad_()
    expected = passes["actor"].clone().requires_grad_()
    result = algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": found})
    loss = trl_loss(batch, {**passes, "actor": expected}, case if "grpo" in case else "dapo", **theirs)
    result.loss.backward()
    loss.backward()
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(found.grad, expected.grad)


def test_rloo_is_trls_gradient_of_whole_answers(rollouts):
    """TRL's RLOOTrainer takes the ratio of whole answers; on policy its gradient is REINFORCE's."""
    batch, passes = rollouts
    algorithm = build(RLOOSettings, corrections=[])
    found = passes["actor"].clone().requires_grad_()
    expected = passes["actor"].clone().requires_grad_()
    algorithm.loss(prepared(algorithm, batch, passes, updates=1), {"logprobs": found}).loss.backward()
    grouped = batch["reward"].view(-1, GROUP)
    advantages = (grouped - (grouped.sum(1, keepdim=True) - grouped) / (GROUP - 1)).flatten()
    answers = (padded(batch, expected) * padded(batch, batch["loss_mask"].float())).sum(1)
    ratio = torch.exp(answers - answers.detach())
    (-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).mean().backward()
    torch.testing.assert_close(found.grad, expected.grad)


ALGORITHMS = {
    "grpo": lambda: build(
        GRPOSettings, regularisers=[{"type": "grpo/reference_kl", "coefficient": 0.1}, "grpo/entropy_bonus"]
    ),
    "grpo by sequence": lambda: build(GRPOSettings, aggregation="core/sequence_mean", corrections=["grpo/token_mask"]),
    "dr_grpo": lambda: build(DrGRPOSettings, aggregation={"length": LONGEST}),
    "rloo": lambda: build(RLOOSettings),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_split_into_microbatches_gives_one_loss_one_gradient_and_one_set_of_metrics(name, data, make_batch):
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], seed=data.draw(st.integers(0, 9)))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    algorithm = ALGORITHMS[name]()
    noise = torch.Generator().manual_seed(1)
    passes = {
        role: batch["logprobs"] + torch.randn(batch.token_count, generator=noise) for role in ("proximal", "reference")
    }
    actor = batch["logprobs"] + 0.5 * torch.randn(batch.token_count, generator=noise)
    weighed = prepared(algorithm, batch, passes).with_tokens(actor=actor, spread=actor.square())

    def run(microbatches):
        total, metrics, gradients = 0.0, [], torch.zeros(len(batch), 10)
        for rows in microbatches:
            part = weighed.select(rows)
            logprobs = part["actor"].clone().requires_grad_()
            result = algorithm.loss(part, {"logprobs": logprobs, "entropy": part["spread"]})
            result.loss.backward()
            total += result.loss.item()
            metrics.append(result.metrics)
            for row, gradient in zip(rows, logprobs.grad.split(part.lengths.tolist()), strict=True):
                gradients[row, : len(gradient)] = gradient
        return total, numbers_of(combine(metrics)), gradients

    whole = run([list(range(len(batch)))])
    split = run([rows for part in range(4) if (rows := [row for row in range(len(batch)) if parts[row] == part])])
    assert split[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-6)
    assert split[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(split[2], whole[2])


def test_denominators_do_not_shrink_when_a_correction_masks(rollouts):
    batch, passes = rollouts
    masked = build(GRPOSettings, corrections=[{"type": "grpo/token_mask", "low": 0.9, "high": 1.1}])
    plain = build(GRPOSettings, corrections=[])
    weighed = prepared(masked, batch, passes)
    assert torch.equal(weighed["loss_weights"], prepared(plain, batch, passes)["loss_weights"])
    share = numbers_of(masked.loss(weighed, {"logprobs": passes["actor"]}).metrics)["masked_fraction"]
    ratio = (passes["proximal"] - batch["logprobs"]).exp()[batch["loss_mask"]]
    assert 0 < share < 1
    assert share == pytest.approx(((ratio < 0.9) | (ratio > 1.1)).float().mean().item())


def test_the_second_update_clips(rollouts):
    """A policy of logits, two updates on one batch, Adam: the frozen proximal policy makes ratios leave 1."""
    batch, _ = rollouts
    algorithm = build(GRPOSettings)
    logits = torch.randn(batch.token_count, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.5)

    def logprobs():
        return logits.log_softmax(-1).gather(1, batch["input_ids"][:, None]).squeeze(1)

    batch = batch.with_tokens(logprobs=logprobs().detach())
    now = logprobs().detach()
    minibatch = prepared(algorithm, batch, {"proximal": now, "reference": now})
    metrics, gradients = [], []
    for _ in range(2):
        optimizer.zero_grad()
        result = algorithm.loss(minibatch, {"logprobs": logprobs()})
        result.loss.backward()
        gradients.append(copy.deepcopy(logits.grad))
        optimizer.step()
        metrics.append(numbers_of(result.metrics))
    assert metrics[0]["clip_fraction"] == 0
    assert metrics[0]["ratio"] == pytest.approx(1)
    assert metrics[1]["clip_fraction"] > 0.3
    assert metrics[1]["ratio"] != pytest.approx(1, abs=1e-3)
    assert (gradients[1] == 0).all(1).sum() > (gradients[0] == 0).all(1).sum()


def test_a_single_update_needs_no_extra_pass(rollouts):
    batch, passes = rollouts

    def refuse(batch):
        raise AssertionError("a pass that nobody needs")

    algorithm = build(GRPOSettings)
    batch = prepared(algorithm, batch, {"proximal": refuse, "reference": refuse}, updates=1)
    assert numbers_of(algorithm.loss(batch, {"logprobs": passes["actor"]}).metrics)["ratio"] == pytest.approx(1)


def kl(policy, reference, estimator):
    """The estimate of each token on policy, without a coefficient."""
    mask = torch.ones(len(policy), dtype=torch.bool)
    nothing = torch.zeros(len(policy))
    terms = PolicyTerms(
        policy, policy.detach(), nothing, nothing, mask, nothing.long(), 1, columns={"reference_logprobs": reference}
    )
    return reference_kl(terms, coefficient=1.0, estimator=estimator)[0]


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_kl_estimators(estimator):
    """k3 is unbiased: its mean over all tokens, weighted by the policy, is the divergence itself."""
    policy, reference = (torch.randn(2, 200, generator=torch.Generator().manual_seed(5)) * 0.2).log_softmax(-1).double()
    divergence = (policy.exp() * (policy - reference)).sum()
    found = (policy.exp() * kl(policy, reference, estimator)).sum()
    assert found.item() == pytest.approx(divergence.item(), rel=0.05 if estimator == "k2" else 1e-6)
    difference = policy - reference
    by_hand = {"k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
    torch.testing.assert_close(kl(policy, reference, estimator), by_hand.get(estimator, by_hand["k3"]))
    assert (kl(policy, reference, estimator) >= 0).all()


def test_the_expected_gradient_of_each_kl_estimator():
    """What the documentation says, over all tokens: tokens are drawn from the policy, and the draw has no gradient."""
    logits, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(6)).double()
    reference = other.log_softmax(-1)

    def gradient(value):
        leaf = logits.clone().requires_grad_()
        value(leaf.log_softmax(-1)).backward()
        return leaf.grad

    def expected(estimate):
        return gradient(lambda policy: (policy.detach().exp() * estimate(policy)).sum())

    forward = gradient(lambda policy: (policy.exp() * (policy - reference)).sum())
    backward = gradient(lambda policy: (reference.exp() * (reference - policy)).sum())
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "k2")), forward)
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "unbiased")), forward)
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "k3")), backward)
    torch.testing.assert_close(expected(lambda policy: policy - reference), torch.zeros(50).double())
    assert not torch.allclose(forward, backward, atol=1e-3)


def test_the_estimator_without_a_gradient_is_refused_with_the_reason():
    with pytest.raises(ValidationError, match=r"k1 .* has a gradient of 0 in expectation.*choose k2"):
        ReferenceKLSettings(coefficient=0.1, estimator="k1")


def test_parts_may_be_left_out():
    assert [stage.__name__ for stage in build(GRPOSettings, group_stages=["grpo/zero_variance"]).group_stages] == [
        "zero_variance"
    ]
    assert list(build(GRPOSettings).group_stages) == []


def test_row_means_leave_out_whatever_stands_where_the_mask_is_off():
    values, mask = torch.tensor([1.0, torch.inf, 3.0, torch.nan]), torch.tensor([True, False, True, False])
    terms = PolicyTerms(values, values, values, values, mask, row_index=torch.tensor([0, 0, 1, 1]), rows=3)
    assert terms.row_mean(values).tolist() == [1.0, 3.0, 0.0]
    assert terms.row_sum(values).tolist() == [1.0, 3.0, 0.0]
