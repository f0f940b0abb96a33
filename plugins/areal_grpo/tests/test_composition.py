"""Whole algorithms: against TRL's padded formulas, over any split into micro-batches, and through several updates."""

import copy
import functools
import math

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
from areal_grpo.config import (
    CISPOSettings,
    DAPOSettings,
    DPPOSettings,
    DrGRPOSettings,
    GRPOSettings,
    GSPOSettings,
    LitePPOSettings,
    M2POSettings,
    PPOSettings,
    ReinforcePPSettings,
    RLOOSettings,
    SAPOSettings,
)
from areal_grpo.loss_settings import ReferenceKLSettings
from areal_grpo.regularisers import reference_kl
from areal_grpo.update_stages import m2po

GROUP, LONGEST = 4, 6
ROLES = {"actor": "proximal", "reference": "reference", "critic": "values"}
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.9, 0.1, 0.2, 0.0, 0.0, 1.0, 0.0]


@pytest.fixture
def rollouts(make_batch):
    """Three groups of four; current, proximal and reference log-probabilities differ from the behaviour's."""
    lengths = [LONGEST + 1 - row % 3 for row in range(len(REWARDS))]
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], lengths=lengths, seed=3)
    generator = torch.Generator().manual_seed(4)

    def near(spread):
        return batch["logprobs"] + spread * torch.randn(batch.token_count, generator=generator)

    passes = {"actor": near(0.4), "proximal": near(0.3), "reference": near(0.3)}
    versions = torch.arange(batch.token_count) % 5 - 1
    batch = batch.with_sequences(part_index=torch.zeros(len(batch), dtype=torch.int64))
    return batch.with_tokens(versions=versions, turn_ids=turns_of(batch)), passes


def turns_of(batch):
    """All that is learnt from is of turn 0."""
    return torch.where(batch["loss_mask"], 0, -1)


def build(settings_type, **settings):
    return PolicyGradient(settings_type.model_validate(settings, context=ResolutionContext(plugins())))


@functools.cache
def plugins():
    return PluginManager.load(["grpo"])


class Engine:
    """A model that answers with these log-probabilities."""

    def __init__(self, logprobs):
        self._logprobs = logprobs

    def forward(self, batch, outputs):
        found = self._logprobs(batch) if callable(self._logprobs) else self._logprobs
        return dict.fromkeys(outputs, found)


def prepared(algorithm, batch, passes, updates=2):
    """The first update's batch, of as many as there are in epochs over the whole."""
    engines = {name: Engine(passes[key]) for name, key in ROLES.items() if key in passes}
    context = BatchContext(TrainingSection(epochs_per_batch=updates), engines, version=4)
    ((work, *_), *_) = algorithm.updates(algorithm.prepare(batch, context), context)
    return work.batch


def padded(batch, flat):
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(batch.lengths.tolist())), batch_first=True)


def trl_loss(batch, passes, loss_type, *, beta=0.0, cap=2.0, low=0.2, high=0.2, delta=None, level="token"):
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
    weights = logprobs - old
    if level == "sequence":
        weights = ((weights * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    first = torch.exp(weights)
    second = torch.clamp(first, 1 - low, 1 + high)
    if delta is not None:
        first = torch.clamp(first, max=delta)
    each = -torch.min(first * advantages, second * advantages)
    if loss_type == "cispo":
        each = -torch.clamp(first, max=1 + high).detach() * advantages * logprobs
    if loss_type == "sapo":
        temperature = torch.where(advantages > 0, 1.0, 1.05)
        each = -torch.sigmoid(temperature * (first - 1)) * 4 / temperature * advantages
    if level == "sequence":
        each = each.expand_as(mask)
    if cap is not None:
        each = each * torch.clamp(torch.exp(old - sampled), max=cap)
    if beta:
        each = each + beta * (torch.exp(reference - logprobs) - (reference - logprobs) - 1)
    if loss_type in {"grpo", "sapo"} or level == "sequence":
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "dr_grpo":
        return (each * mask).sum() / (len(each) * LONGEST)
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


CASES = {
    "token mean": (GRPOSettings, {}, {}),
    "dapo": (DAPOSettings, {}, {"high": 0.28}),
    # TRL weighs a whole sequence's loss by each token's weight, and so has another gradient than GSPO: without them.
    "gspo": (GSPOSettings, {"corrections": []}, {"level": "sequence", "low": 3e-4, "high": 4e-4, "cap": None}),
    "gspo, wide": (
        GSPOSettings,
        {"corrections": [], "policy_loss": {"clip_low": 0.2, "clip_high": 0.2}},
        {"level": "sequence", "cap": None},
    ),
    "cispo": (CISPOSettings, {}, {"high": 4.0}),
    "cispo, bounded": (CISPOSettings, {"policy_loss": {"clip_high": 0.1}}, {"high": 0.1}),
    "sapo": (SAPOSettings, {}, {}),
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
    kind = case.partition(",")[0]
    loss_type = kind if kind in {"grpo", "dr_grpo", "cispo", "sapo"} else "dapo"
    loss = trl_loss(batch, {**passes, "actor": expected}, loss_type, **theirs)
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
    "dapo": lambda: build(DAPOSettings),
    "gspo": lambda: build(GSPOSettings),
    "cispo": lambda: build(CISPOSettings),
    "sapo": lambda: build(SAPOSettings),
    "reinforce_pp": lambda: build(ReinforcePPSettings),
    "m2po": lambda: build(M2POSettings),
    "dppo": lambda: build(DPPOSettings),
    "ppo": lambda: build(PPOSettings),
    "lite_ppo": lambda: build(LitePPOSettings),
    "gmpo": lambda: build(GRPOSettings, policy_loss="grpo/gmpo", aggregation="core/sequence_mean"),
    "bypass": lambda: build(GRPOSettings, proximal="behaviour"),
    "interpolated": lambda: build(GRPOSettings, proximal="interpolated"),
    "every mask": lambda: build(
        GRPOSettings,
        corrections=[
            "grpo/sequence_truncate",
            {"type": "grpo/geometric_mask", "low": 0.5, "high": 2},
            {"type": "grpo/product_mask", "low": 0.1, "high": 10},
            {"type": "grpo/veto", "low": 0.05},
            {"type": "grpo/opsm", "threshold": 0.2},
            {"type": "grpo/kpop", "threshold": 0.5},
        ],
    ),
}


@functools.cache
def algorithm_of(name):
    return ALGORITHMS[name]()


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=15)
@given(data=st.data())
def test_any_split_into_microbatches_gives_one_loss_one_gradient_and_one_set_of_metrics(name, data, make_batch):
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], seed=data.draw(st.integers(0, 9)))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
    algorithm = algorithm_of(name)
    noise = torch.Generator().manual_seed(1)
    batch = batch.with_tokens(versions=torch.arange(batch.token_count) % 5 - 1, turn_ids=turns_of(batch))
    batch = batch.with_sequences(part_index=torch.zeros(len(batch), dtype=torch.int64))
    roles = ("proximal", "reference", "values")
    passes = {role: batch["logprobs"] + torch.randn(batch.token_count, generator=noise) for role in roles}
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


def by_index(batch, passes, proximal, corrected=2.0, low=0.2, high=0.2):
    """Loss and gradient of decoupled PPO by index (arXiv 2505.24298), with each token's proximal log-probability."""
    groups = batch["reward"].double().view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten().tolist()
    mask, rows = batch["loss_mask"].tolist(), batch.tokens.row_index.tolist()
    logprobs, behaviour = passes["actor"].double().tolist(), batch["logprobs"].double().tolist()
    total, gradient = 0.0, [0.0] * len(mask)
    for place, row in enumerate(rows):
        if not mask[place]:
            continue
        ratio, advantage = math.exp(logprobs[place] - proximal[place]), advantages[row]
        weight = min(math.exp(proximal[place] - behaviour[place]), corrected) / sum(mask)
        bounded = min(max(ratio, 1 - low), 1 + high)
        total -= weight * min(ratio * advantage, bounded * advantage)
        gradient[place] = -weight * ratio * advantage if ratio * advantage <= bounded * advantage else 0.0
    return total, gradient


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour", "interpolated"])
def test_the_proximal_policy_by_index(proximal, rollouts):
    """Decoupled, bypassed, and interpolated: with the version v of a token and V of the batch, the share of the current
    policy is 1 - 1/(V + 1 - v), as the update makes version V + 1 (A-3PO, arXiv 2512.06547)."""
    batch, passes = rollouts
    behaviour, current = batch["logprobs"].double().tolist(), passes["actor"].double().tolist()
    if proximal == "recomputed":
        between = passes["proximal"].double().tolist()
    elif proximal == "behaviour":
        between = behaviour
    else:
        versions = batch["versions"].tolist()
        ages = [4 + 1 - version for version in versions]
        shares = [1 - 1 / age if version >= 0 else 0.0 for age, version in zip(ages, versions, strict=True)]
        between = [mu + share * (pi - mu) for mu, pi, share in zip(behaviour, current, shares, strict=True)]
        assert {round(share, 3) for share in shares} == {0.0, 0.5, 0.667, 0.75, 0.8}
    total, gradient = by_index(batch, passes, between)
    algorithm = build(GRPOSettings, proximal=proximal)
    found = passes["actor"].clone().requires_grad_()
    result = algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": found})
    result.loss.backward()
    assert result.loss.item() == pytest.approx(total, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found.grad, torch.tensor(gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("proximal", ["behaviour", "interpolated"])
@pytest.mark.parametrize("updates", [1, 4])
def test_without_a_proximal_policy_of_its_own_there_is_no_pass(proximal, updates, rollouts):
    batch, _ = rollouts

    def refuse(batch):
        raise AssertionError("a pass that nobody needs")

    algorithm = build(GRPOSettings, proximal=proximal)
    prepared(algorithm, batch, {"proximal": refuse}, updates=updates)


@pytest.mark.parametrize("proximal", ["recomputed", "behaviour", "interpolated"])
def test_how_far_the_policies_are_apart_is_logged_whatever_corrects_for_it(proximal, rollouts):
    """Each figure by index, with nothing that corrects; where no proximal policy is computed, of the current one."""
    batch, passes = rollouts
    algorithm = build(GRPOSettings, proximal=proximal, corrections=[])
    found = algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": passes["actor"]})
    there = passes["proximal" if proximal == "recomputed" else "actor"].double().tolist()
    sampled, mask, rows = batch["logprobs"].double().tolist(), batch["loss_mask"].tolist(), batch.tokens.row_index
    ratios = [math.exp(a - b) for a, b, learnt in zip(there, sampled, mask, strict=True) if learnt]
    means = {}
    for row in range(len(batch)):
        logs = [there[i] - sampled[i] for i in range(len(mask)) if mask[i] and rows[i] == row]
        means |= {row: math.exp(sum(logs) / len(logs))} if logs else {}
    outside = [not 0.99 <= means[row] <= 1.01 for row, learnt in zip(rows.tolist(), mask, strict=True) if learnt]
    count = len(ratios)
    expected = {
        "behaviour_kl_k1": sum(-math.log(ratio) for ratio in ratios) / count,
        "behaviour_kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / count,
        "behaviour_difference": sum(abs(math.log(ratio)) for ratio in ratios) / count,
        "behaviour_above_two": sum(ratio > 2 for ratio in ratios) / count,
        "behaviour_mean_off": sum(outside) / count,
        "effective_sample_share": sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)),
    }
    numbers = numbers_of(found.metrics)
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert numbers["behaviour_above_two"] > 0 or proximal == "recomputed"


def trusted_by_index(moments, threshold):
    """M2PO, arXiv 2510.01161: leave out the largest until the mean of the others is at most the threshold."""
    left = sorted(moments)
    while left and sum(left) / len(left) > threshold:
        left.pop()
    return [moment <= left[-1] if left else False for moment in moments]


@settings(max_examples=40)
@given(data=st.data())
def test_m2po_trusts_what_the_paper_trusts_in_any_order(data, make_batch):
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], seed=data.draw(st.integers(0, 9)))
    spread = data.draw(st.sampled_from([0.0, 0.1, 0.5, 3.0]))
    threshold = data.draw(st.sampled_from([1e-6, 0.04, 0.5]))
    noise = torch.randn(batch.token_count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    batch = batch.with_tokens(current=batch["logprobs"] + spread * noise)
    context = BatchContext(TrainingSection(), {"actor": Engine(lambda batch: batch["current"])})
    mask, difference = batch["loss_mask"], batch["current"] - batch["logprobs"]
    found = m2po(batch, context, threshold=threshold)["trusted"]
    expected = trusted_by_index(difference[mask].square().double().tolist(), threshold)
    assert found[mask].tolist() == expected
    assert not found[~mask].any()
    shares = numbers_of(context.metrics)
    assert shares["distrusted_fraction"] == pytest.approx(1 - sum(expected) / len(expected))
    assert shares["second_moment"] == pytest.approx(difference[mask].square().mean().item(), rel=1e-5, abs=1e-9)
    order = data.draw(st.permutations(range(len(batch))))
    again = m2po(batch.select(order), context, threshold=threshold)["trusted"]
    assert torch.equal(again, batch.with_tokens(trusted=found).select(order)["trusted"])


def test_m2po_leaves_out_equals_together(make_batch):
    batch = make_batch([1.0, 0.0], [0, 0], lengths=[5, 5])
    batch = batch.with_tokens(loss_mask=torch.ones(10, dtype=torch.bool))
    moved = batch["logprobs"] + torch.tensor([0.5] * 4 + [0.0] * 6)
    context = BatchContext(TrainingSection(), {"actor": Engine(moved)})
    assert m2po(batch, context, threshold=0.09)["trusted"].tolist() == [False] * 4 + [True] * 6


def test_m2po_learns_from_what_it_trusts_and_divides_by_all(rollouts):
    """Its loss by index, and each update asks the policy anew."""
    batch, passes = rollouts
    algorithm = build(M2POSettings)
    asked = []

    def answer(batch):
        asked.append(len(batch))
        return passes["actor"]

    context = BatchContext(TrainingSection(epochs_per_batch=2), {"actor": Engine(answer)}, version=4)
    works = [work for (work,) in algorithm.updates(algorithm.prepare(batch, context), context)]
    assert asked == [len(batch)] * 2
    found = passes["actor"].clone().requires_grad_()
    result = algorithm.loss(works[0].batch, {"logprobs": found})
    result.loss.backward()
    mask, advantages = batch["loss_mask"], works[0].batch["advantages"]
    ratio = (passes["actor"] - batch["logprobs"]).exp()
    trusted = works[0].batch["trusted"]
    assert 0 < trusted.sum() < mask.sum()
    assert ((passes["actor"] - batch["logprobs"])[trusted].square().mean()) <= 0.04
    expected = torch.where(trusted, -ratio * advantages / mask.sum(), 0.0)
    torch.testing.assert_close(found.grad, expected)


def test_the_entropy_is_led_to_its_target_and_the_state_remembers(rollouts):
    """By hand: below the target the coefficient grows and is used; above it shrinks, never below 0, and is not."""
    batch, passes = rollouts
    algorithm = build(
        GRPOSettings,
        corrections=[],
        update_stages=[{"type": "grpo/entropy_target", "target": 0.5, "step": 0.1, "maximum": 0.25}],
        regularisers=["grpo/adaptive_entropy"],
    )
    state, spread = {}, torch.rand(batch.token_count, generator=torch.Generator().manual_seed(1)) / 10
    below = [(0.3, 0.1, 0.1), (0.3, 0.2, 0.2), (0.3, 0.25, 0.25)]
    above = [(0.9, 0.15, 0), (0.9, 0.05, 0), (0.9, 0.0, 0)]
    for entropy, kept, used in [*below, *above]:
        answers = torch.where(batch["loss_mask"], entropy + spread, torch.nan)
        context = BatchContext(TrainingSection(), {"actor": Engine(answers)}, state=state)
        ((work, *_),) = algorithm.updates(algorithm.prepare(batch, context), context)
        assert state["entropy_target/coefficient"].item() == pytest.approx(kept)
        assert numbers_of(context.metrics)["entropy_coefficient"] == pytest.approx(used)
        leaf = answers.clone().requires_grad_()
        algorithm.loss(work.batch, {"logprobs": passes["actor"], "entropy": leaf}).loss.backward()
        expected = torch.where(batch["loss_mask"], -used / batch["loss_mask"].sum(), 0.0)
        torch.testing.assert_close(leaf.grad, expected)


def test_dppo_is_a_masked_importance_ratio(rollouts):
    batch, passes = rollouts
    algorithm = build(DPPOSettings)
    work = prepared(algorithm, batch, {})
    found = passes["actor"].clone().requires_grad_()
    algorithm.loss(work, {"logprobs": found}).loss.backward()
    now, then, advantages = passes["actor"].exp(), batch["logprobs"].exp(), work["advantages"]
    leaves = ((now - then > 0.2) & (advantages > 0)) | ((then - now > 0.2) & (advantages < 0))
    expected = torch.where(batch["loss_mask"] & ~leaves, -now / then * advantages / batch["loss_mask"].sum(), 0.0)
    assert leaves[batch["loss_mask"]].any()
    torch.testing.assert_close(found.grad, expected)


def test_ppo_learns_with_a_critic_and_the_critic_alone_at_first(rollouts):
    batch, passes = rollouts
    algorithm = build(PPOSettings, warmup_steps=3)
    engines = {"actor": Engine(passes["proximal"]), "critic": Engine(passes["reference"])}
    for step, roles in ((0, ["critic"]), (3, ["actor", "critic"])):
        context = BatchContext(TrainingSection(epochs_per_batch=2), engines, step=step)
        works = next(iter(algorithm.updates(algorithm.prepare(batch, context), context)))
        assert [work.role for work in works] == roles


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
