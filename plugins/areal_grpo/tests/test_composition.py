"""Whole algorithms: against TRL's padded formulas, over any split into micro-batches, and through several updates."""

import asyncio
import copy
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from composed import GROUP, LONGEST, REWARDS, Engine, build, make_rollouts, prepared, turns_of
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.algorithms.composition import _checking, _checking_weights
from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, Ragged, combine
from areal_core.errors import RunError
from areal_core.sdk import PolicyTerms
from areal_core.training.context import BatchContext
from areal_grpo.config import (
    CISPOSettings,
    DAPOSettings,
    DPPOSettings,
    DrGRPOSettings,
    GMPOSettings,
    GRPOSettings,
    GSPOSettings,
    LitePPOSettings,
    M2POSettings,
    PPOSettings,
    ReinforcePPSettings,
    RLOOSettings,
    SAPOSettings,
)
from areal_testing.conformance import numbers_of


def padded(batch, flat):
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(batch.lengths.tolist())), batch_first=True)


def trl_loss(
    batch, passes, loss_type, *, beta=0.0, corrected=False, cap=2.0, low=0.2, high=0.2, delta=None, level="token"
):
    """What TRL's GRPOTrainer minimizes, on padded [B, L] tensors, with its truncated correction for vLLM."""
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
        divergence = torch.exp(reference - logprobs) - (reference - logprobs) - 1
        each = each + beta * (divergence * torch.exp(logprobs - old) if corrected else divergence)
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
    "grpo": (GRPOSettings, {"loss_aggregation": "core/sequence_mean"}, {}),
    "dr_grpo": (DrGRPOSettings, {"loss_aggregation": {"length": LONGEST}}, {}),
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
        {"regularizers": ["grpo/reference_kl"], "corrections": []},
        {"beta": 0.04, "cap": None, "corrected": True},
    ),
    "penalty towards a reference, before TRL 1.16": (
        GRPOSettings,
        {"regularizers": [{"type": "grpo/reference_kl", "estimator": "k3"}], "corrections": []},
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
        GRPOSettings, regularizers=[{"type": "grpo/reference_kl", "coefficient": 0.1}, "grpo/entropy_bonus"]
    ),
    "grpo by sequence": lambda: build(
        GRPOSettings, loss_aggregation="core/sequence_mean", corrections=["grpo/token_mask"]
    ),
    "dr_grpo": lambda: build(DrGRPOSettings, loss_aggregation={"length": LONGEST}),
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
    "gmpo": lambda: build(GMPOSettings),
    "vespo": lambda: build(GRPOSettings, policy_loss="grpo/vespo", corrections=[]),
    "bypass": lambda: build(GRPOSettings, proximal="behavior"),
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
            {"type": "grpo/ipo_mask", "threshold": 0.2},
        ],
    ),
}


@functools.cache
def algorithm_of(name):
    return ALGORITHMS[name]()


@pytest.mark.slow
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


def test_gmpo_is_the_mean_over_sequences_of_geometric_means():
    """By hand: three tokens with A = 1, of which the last is clipped at 0.4, and one token with A = -2."""
    columns = {
        "input_ids": [0, 0, 0, 0, 0, 0],
        "loss_mask": [True, True, True, False, True, False],
        "logprobs": [-1.0, -1.0, -1.0, 0.0, -1.0, 0.0],
        "proximal_logprobs": [-1.0, -1.0, -1.0, 0.0, -1.0, 0.0],
        "advantages": [1.0, 1.0, 1.0, 0.0, -2.0, 0.0],
    }
    tokens = Ragged(torch.tensor([4, 2]), {key: torch.tensor(value) for key, value in columns.items()})
    batch = PackedBatch(tokens, {"group_id": torch.tensor([0, 0])})
    algorithm = build(GMPOSettings)
    ((work,),) = algorithm.updates(batch, BatchContext(TrainingSection(), {}))
    policy = torch.tensor([-0.9, -1.2, 0.0, 0.0, -1.3, 0.0], requires_grad=True)
    result = algorithm.loss(work.batch, {"logprobs": policy})
    result.loss.backward()
    long, short = math.exp((0.1 - 0.2 + 0.4) / 3), math.exp(-0.3)
    assert result.loss.item() == pytest.approx((-long + 2 * short) / 2)
    expected = [-long / 6, -long / 6, 0.0, 0.0, short, 0.0]
    assert policy.grad.tolist() == pytest.approx(expected)


def keeps_the_first_and_the_last(terms):
    """A mask of a third party."""
    return torch.tensor([False, True, False, False, True, False]), {}


def the_same_in_numbers(terms):
    return keeps_the_first_and_the_last(terms)[0].float(), {}


def weights_and_a_mask(terms):
    return torch.tensor([7.0, 0.5, 0.0, torch.nan, 2.0, torch.inf]), {}


@pytest.mark.parametrize(
    ("correction", "loss", "gradient"),
    [
        # (policy + 0.6 KL - 0.03 H) / 3 of each token: (2, 0.1159, 1), (2, 0.1841, 2) and (-1, 0, 3) over 3.
        (None, 3.12 / 3, [2.3, 1.4, -1.0]),
        ("keeps_the_first_and_the_last", 1.12 / 3, [2.3, -0.6, -1.0]),
        ("the_same_in_numbers", 1.12 / 3, [2.3, -0.6, -1.0]),
        ("weights_and_a_mask", (0.5 * 2.0858883 + 0.1241117 - 2 * 1.09) / 3, [1.15, -0.6, -2.0]),
        ({"type": "grpo/opsm", "threshold": 0.5}, -0.88 / 3, [0.3, -0.6, -1.0]),
        ({"type": "grpo/geometric_mask"}, 0.12 / 3, [0.3, -0.6, 0.0]),
        ("trusted", 1.12 / 3, [2.3, -0.6, -1.0]),
    ],
)
def test_a_mask_removes_the_policy_loss_and_an_importance_weight_weighs_the_regularizers_too(
    correction, loss, gradient
):
    """By hand, on sequences of two tokens and of one; the KL is k3 at log-ratios ln 2, -ln 2 and 0."""
    log2, off = math.log(2), -9.0  # of positions that are not in the loss
    columns = {
        "loss_mask": [False, True, True, False, True, False],
        "logprobs": [off, 0.0, -1.0, off, -4.0, off],
        "advantages": [5.0, -2.0, -2.0, 5.0, 1.0, 5.0],
        "loss_weights": [0.0, 1 / 3, 1 / 3, 0.0, 1 / 3, 0.0],
        "reference_logprobs": [off, -1 - log2, -2 + log2, off, -3.0, off],
    }
    if correction == "trusted":
        columns["trusted"] = [True, True, False, True, True, True]
    batch = PackedBatch(Ragged(torch.tensor([4, 2]), {key: torch.tensor(value) for key, value in columns.items()}), {})
    own = correction in ("keeps_the_first_and_the_last", "the_same_in_numbers", "weights_and_a_mask")
    algorithm = build(
        GRPOSettings,
        corrections=[] if correction in (None, "trusted") else [f"{__file__}:{correction}" if own else correction],
        regularizers=[
            {"type": "grpo/reference_kl", "coefficient": 0.6, "estimator": "k3"},
            {"type": "grpo/entropy_bonus", "coefficient": 0.03},
        ],
    )
    policy = torch.tensor([off, -1.0, -2.0, off, -3.0, off], requires_grad=True)
    entropy = torch.tensor([off, 1.0, 2.0, off, 3.0, off], requires_grad=True)
    result = algorithm.loss(batch, {"logprobs": policy, "entropy": entropy})
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert policy.grad[[1, 2, 4]].tolist() == pytest.approx([value / 3 for value in gradient], abs=1e-6)
    weights = (0.5, 1.0, 2.0) if correction == "weights_and_a_mask" else (1.0, 1.0, 1.0)
    assert entropy.grad[[1, 2, 4]].tolist() == pytest.approx([-0.01 * weight for weight in weights])
    assert not policy.grad[[0, 3, 5]].any()


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


def test_ipo_mask_with_the_unbounded_ratio_is_the_policy_term_of_prime_rl(rollouts):
    """The summed loss -m A π / μ of prime-rl's IPO, differentiated by autograd in float64."""
    batch, passes = rollouts
    loss = {"type": "grpo/rollout_importance", "clip_low": None, "clip_high": None}
    algorithm = build(GRPOSettings, policy_loss=loss, corrections=[{"type": "grpo/ipo_mask", "threshold": 0.1}])
    work = prepared(algorithm, batch, {})
    ours = passes["actor"].clone().requires_grad_()
    algorithm.loss(work, {"logprobs": ours}).loss.backward()
    policy = passes["actor"].double().requires_grad_()
    sampler = batch["logprobs"].double()
    is_kept = batch["loss_mask"] & ((policy.exp() - sampler.exp()).abs() <= 0.1)
    assert 0 < is_kept.sum() < batch["loss_mask"].sum()
    terms = -(policy - sampler).exp() * work["advantages"] * is_kept
    (terms.sum() / batch["loss_mask"].sum()).backward()
    torch.testing.assert_close(ours.grad.double(), policy.grad, rtol=1e-6, atol=1e-8)


def test_ppo_learns_with_a_critic_and_the_critic_alone_at_first(rollouts):
    batch, passes = rollouts
    algorithm = build(PPOSettings, warmup_steps=3)
    engines = {"actor": Engine(passes["proximal"]), "critic": Engine(passes["reference"])}
    for step, roles in ((0, ["critic"]), (3, ["actor", "critic"])):
        context = BatchContext(TrainingSection(num_epochs=2), engines, step=step)
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


def test_parts_may_be_left_out():
    assert [one.__name__ for one in build(GRPOSettings, group_filters=["grpo/zero_variance"]).group_filters] == [
        "zero_variance"
    ]
    assert list(build(GRPOSettings).group_filters) == []


def test_reward_shaping_that_returns_nothing_is_an_error_and_drops_no_group(tmp_path):
    """Nor does a coroutine, or one that returns a generator."""
    (tmp_path / "mine.py").write_text(
        "def forgets(episodes):\n    [e for e in episodes]\n"
        "async def waits(episodes):\n    [e for e in episodes]\n"
        "def yields(episodes):\n    return (e for e in episodes)\n"
    )
    names = [f"{tmp_path}/mine.py:{name}" for name in ("forgets", "waits", "yields")]
    for name, shaping in zip(names, build(GRPOSettings, reward_shaping=names).group_filters, strict=True):
        with pytest.raises(ValueError, match=rf"'{name}' returned .*; it must return the episodes"):
            asyncio.run(shaping([]))


def test_row_means_leave_out_whatever_stands_where_the_mask_is_off():
    values, mask = torch.tensor([1.0, torch.inf, 3.0, torch.nan]), torch.tensor([True, False, True, False])
    terms = PolicyTerms(values, values, values, values, mask, row_index=torch.tensor([0, 0, 1, 1]), rows=3)
    assert terms.row_mean(values).tolist() == [1.0, 3.0, 0.0]
    assert terms.row_sum(values).tolist() == [1.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda losses: losses.mean(), r"gave a tensor of shape \(\), and must give \(\d+,\), one value for each tok"),
        (lambda losses: losses[:-1], r"gave a tensor of shape \(\d+,\), and must give"),
        (lambda losses: losses.detach(), "nothing in the loss depends on the model"),
    ],
    ids=["a mean", "one too few", "no gradient"],
)
def test_a_policy_loss_that_is_no_loss_of_tokens_is_refused(make_batch, broken, words):
    """A mean would be spread over all tokens, prompts among them; without a gradient a run would learn nothing."""
    batch, passes = make_rollouts(make_batch)
    algorithm = build(GRPOSettings)
    batch = prepared(algorithm, batch, passes)
    chosen = algorithm._settings.policy_loss
    whole = chosen.build()

    def policy_loss(terms):
        losses, logged = whole(terms)
        return broken(losses), logged

    algorithm._policy_loss = _checking(SimpleNamespace(build=lambda: policy_loss, title=chosen.title))
    with pytest.raises(RunError, match=words):
        algorithm.loss(batch, {"logprobs": passes["actor"].clone().requires_grad_()})


@pytest.mark.parametrize(
    ("weigh", "words"),
    [
        pytest.param(lambda terms: (terms.logprobs - terms.behavior_logprobs).exp(), "with a gradient", id="gradient"),
        pytest.param(lambda terms: terms.mask.long(), "gave torch.int64, and must give bool", id="integers"),
    ],
)
def test_weights_that_would_change_the_loss_are_refused(rollouts, weigh, words):
    batch, passes = rollouts
    algorithm = build(GRPOSettings, corrections=[])
    correction = SimpleNamespace(build=lambda: lambda terms: (weigh(terms), {}), title="correction weigh")
    algorithm._corrections = [_checking_weights(correction)]
    with pytest.raises(RunError, match=f"the correction weigh gave .*{words.removeprefix('gave ')}"):
        algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": passes["actor"].clone().requires_grad_()})
