"""The proximal policy recomputed, bypassed and interpolated, and what is logged of its distance, by index."""

import math

import pytest
import torch
from composed import GROUP, build, prepared

from areal_grpo.config import (
    GRPOSettings,
)
from areal_testing.conformance import numbers_of


def by_index(batch, passes, proximal, corrected=2.0, low=0.2, high=0.2):
    """Loss and gradient of decoupled PPO by index (arXiv 2505.24298), with each token's proximal log-probability."""
    groups = batch["reward"].double().view(-1, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten().tolist()
    mask, rows = batch["loss_mask"].tolist(), batch.tokens.row_index.tolist()
    logprobs, behavior = passes["actor"].double().tolist(), batch["logprobs"].double().tolist()
    total, gradient = 0.0, [0.0] * len(mask)
    for place, row in enumerate(rows):
        if not mask[place]:
            continue
        ratio, advantage = math.exp(logprobs[place] - proximal[place]), advantages[row]
        weight = min(math.exp(proximal[place] - behavior[place]), corrected) / sum(mask)
        bounded = min(max(ratio, 1 - low), 1 + high)
        total -= weight * min(ratio * advantage, bounded * advantage)
        gradient[place] = -weight * ratio * advantage if ratio * advantage <= bounded * advantage else 0.0
    return total, gradient


@pytest.mark.parametrize("proximal", ["recomputed", "behavior", "interpolated"])
def test_the_proximal_policy_by_index(proximal, rollouts):
    """Decoupled, bypassed, and interpolated: with the version v of a token and V of the batch, the share of the current
    policy is 1 - 1/(V + 1 - v), as the update makes version V + 1 (A-3PO, arXiv 2512.06547)."""
    batch, passes = rollouts
    behavior, current = batch["logprobs"].double().tolist(), passes["actor"].double().tolist()
    if proximal == "recomputed":
        between = passes["proximal"].double().tolist()
    elif proximal == "behavior":
        between = behavior
    else:
        versions = batch["versions"].tolist()
        ages = [4 + 1 - version for version in versions]
        shares = [1 - 1 / age if version >= 0 else 0.0 for age, version in zip(ages, versions, strict=True)]
        between = [mu + share * (pi - mu) for mu, pi, share in zip(behavior, current, shares, strict=True)]
        assert {round(share, 3) for share in shares} == {0.0, 0.5, 0.667, 0.75, 0.8}
    total, gradient = by_index(batch, passes, between)
    algorithm = build(GRPOSettings, proximal=proximal)
    found = passes["actor"].clone().requires_grad_()
    result = algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": found})
    result.loss.backward()
    assert result.loss.item() == pytest.approx(total, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found.grad, torch.tensor(gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("proximal", ["behavior", "interpolated"])
@pytest.mark.parametrize("updates", [1, 4])
def test_without_a_proximal_policy_of_its_own_there_is_no_pass(proximal, updates, rollouts):
    batch, _ = rollouts

    def refuse(batch):
        raise AssertionError("a pass that nobody needs")

    algorithm = build(GRPOSettings, proximal=proximal)
    prepared(algorithm, batch, {"proximal": refuse}, updates=updates)


@pytest.mark.parametrize("proximal", ["recomputed", "behavior", "interpolated"])
def test_how_far_the_policies_are_apart_is_logged_whatever_corrects_for_it(proximal, rollouts):
    """Each figure by index, with nothing that corrects; where no proximal policy is computed, of the current one."""
    batch, passes = rollouts
    algorithm = build(GRPOSettings, proximal=proximal, corrections=[])
    found = algorithm.loss(prepared(algorithm, batch, passes), {"logprobs": passes["actor"]})
    there = passes["proximal" if proximal == "recomputed" else "actor"].double().tolist()
    sampled, mask, rows = batch["logprobs"].double().tolist(), batch["loss_mask"].tolist(), batch.tokens.row_index
    ratios = [math.exp(a - b) for a, b, learned in zip(there, sampled, mask, strict=True) if learned]
    means = {}
    for row in range(len(batch)):
        logs = [there[i] - sampled[i] for i in range(len(mask)) if mask[i] and rows[i] == row]
        means |= {row: math.exp(sum(logs) / len(logs))} if logs else {}
    outside = [not 0.99 <= means[row] <= 1.01 for row, learned in zip(rows.tolist(), mask, strict=True) if learned]
    count = len(ratios)
    expected = {
        "behavior_kl_k1": sum(-math.log(ratio) for ratio in ratios) / count,
        "behavior_kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / count,
        "behavior_difference": sum(abs(math.log(ratio)) for ratio in ratios) / count,
        "behavior_above_two": sum(ratio > 2 for ratio in ratios) / count,
        "behavior_mean_off": sum(outside) / count,
        "effective_sample_share": sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)),
    }
    numbers = numbers_of(found.metrics)
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert numbers["behavior_above_two"] > 0 or proximal == "recomputed"
