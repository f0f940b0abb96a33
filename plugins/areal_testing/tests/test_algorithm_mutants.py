"""Test the suites of algorithms and their parts: correct components pass, and each broken one fails its test."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from areal_core.algorithms.composition import PolicyGradient
from areal_core.algorithms.loss_aggregation import token_mean
from areal_core.algorithms.settings import PolicyGradientSettings
from areal_core.data import Metric, group_mean
from areal_core.errors import RunError
from areal_core.sdk import LossResult
from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    CorrectionSuite,
    GroupFilterSuite,
    PolicyLossSuite,
    RewardShapingSuite,
)

# Correct components in their simplest form.


def centered(batch):
    return batch["reward"] - group_mean(batch, batch["reward"])


def clipped(terms):
    ratio = torch.exp(torch.where(terms.mask, terms.logprobs - terms.proximal_logprobs, 0.0))
    bounded = ratio.clamp(0.8, 1.2)
    losses = -torch.minimum(ratio * terms.advantages, bounded * terms.advantages)
    return losses, {"clip_fraction": (ratio != bounded).float()}


def sequence_ratio(terms):
    """Return GSPO's loss: the ratio of a sequence is the mean over its tokens."""
    ratio = torch.exp(terms.row_mean(terms.logprobs - terms.proximal_logprobs))[terms.row_index]
    return -ratio * terms.advantages, {}


def truncated(terms):
    difference = torch.where(terms.mask, terms.proximal_logprobs - terms.behavior_logprobs, 0.0)
    return torch.exp(difference).clamp(max=2.0).detach(), {}


def masked(terms):
    weights, _ = truncated(terms)
    return torch.where(weights > 0.5, weights, 0.0), {}


def keeps_spread(episodes):
    return episodes if len({episode.reward for episode in episodes}) > 1 else None


def halved(episodes):
    return [replace(episode, reward=episode.reward / 2) for episode in episodes]


class Composition(PolicyGradient):
    """The core's algorithm with these parts."""

    def __init__(self, advantage=centered, policy_loss=clipped, correction=masked, loss_aggregation=token_mean):
        parts = {"advantage": f"{__file__}:centered", "policy_loss": f"{__file__}:clipped"}
        super().__init__(PolicyGradientSettings.model_validate(parts))
        self._advantage, self._policy_loss = advantage, policy_loss
        self._corrections, self._loss_aggregation = [correction], loss_aggregation


class TestAdvantage(AdvantageSuite):
    def make(self):
        return centered


class TestClippedLoss(PolicyLossSuite):
    def make(self):
        return clipped


class TestSequenceLoss(PolicyLossSuite):
    def make(self):
        return sequence_ratio


class TestTruncation(CorrectionSuite):
    def make(self):
        return truncated


class TestMasking(CorrectionSuite):
    def make(self):
        return masked


class TestFilter(GroupFilterSuite):
    examples = (([0, 1], [0, 1]), ([1, 1], None))

    def make(self):
        return keeps_spread


class TestShaping(RewardShapingSuite):
    examples = (([0, 1], [0, 0.5]),)

    def make(self):
        return halved


class TestComposition(AlgorithmSuite):
    def make(self):
        return Composition()


class TestSequenceComposition(AlgorithmSuite):
    def make(self):
        return Composition(policy_loss=sequence_ratio)


class TestPolicyGradientOfTheConfig(AlgorithmSuite):
    """The same algorithm from a config, with parts that are named by import."""

    component = "core/policy_gradient"
    settings: ClassVar = {"advantage": f"{__file__}:centered", "policy_loss": f"{__file__}:clipped"}


# Broken components.


def positional_groups(batch):
    """Take blocks of three sequences for groups."""
    rewards = batch["reward"].view(-1, 3)
    return (rewards - rewards.mean(1, keepdim=True)).flatten()


def number_of_group_used(batch):
    return centered(batch) * (1 + batch["group_id"] / 1e6)


def whole_batch_centered(batch):
    return batch["reward"] - batch["reward"].mean()


def trajectories_counted(batch):
    """Count every trajectory, so that an episode with three trajectories has three times the weight."""
    same = batch["group_id"][:, None] == batch["group_id"][None]
    return batch["reward"] - (same * batch["reward"][None]).sum(1) / same.sum(1)


def no_spread_divided(batch):
    center = centered(batch)
    return center / group_mean(batch, center.square()).sqrt()


def in_place(batch):
    batch["reward"].sub_(group_mean(batch, batch["reward"]))
    return batch["reward"]


def advantage_with_gradient(batch):
    return centered(batch) * torch.ones((), requires_grad=True)


def advantage_in_double(batch):
    return centered(batch).double()


def normalized_in_the_loss(terms):
    """Whiten advantages over the micro-batch."""
    inside = terms.advantages[terms.mask]
    return clipped(replace(terms, advantages=(terms.advantages - inside.mean()) / inside.std()))


def gradient_through_the_advantage(terms):
    """Subtract a penalty from the advantage and forget to detach it."""
    return clipped(replace(terms, advantages=terms.advantages - 0.1 * (terms.logprobs - terms.proximal_logprobs)))


def sign_of_the_loss(terms):
    losses, logged = clipped(terms)
    return -losses, logged


def prompt_tokens_in_the_ratio(terms):
    return sequence_ratio(replace(terms, mask=torch.ones_like(terms.mask)))


def mean_instead_of_tokens(terms):
    losses, logged = clipped(terms)
    return losses.mean(), logged


def ratio_that_overflows(terms):
    ratio = torch.exp(8 * (terms.logprobs - terms.proximal_logprobs).abs())
    return -ratio * terms.advantages, {}


def without_gradient(terms):
    return clipped(replace(terms, logprobs=terms.logprobs.detach()))[0] + 0 * terms.entropy, {}


def denominators_after_masking(terms):
    """Raise the weights of unmasked tokens, so that the sum stays."""
    weights, logged = masked(terms)
    kept = (weights[terms.mask] > 0).float().mean()
    return weights / kept, logged


def weights_with_gradient(terms):
    return torch.exp(terms.logprobs - terms.behavior_logprobs), {}


def weights_that_overflow(terms):
    return torch.exp(6 * (terms.proximal_logprobs - terms.behavior_logprobs)).detach(), {}


def half_on_policy(terms):
    weights, logged = truncated(terms)
    return weights * 0.5, logged


def drops_by_first(episodes):
    return episodes if episodes[0].reward > 0 else None


def keeps_the_best(episodes):
    return [max(episodes, key=lambda episode: episode.reward)]


def shapes_in_place(episodes):
    for episode in episodes:
        episode.reward -= 1
    return episodes


def divides_by_the_sum(episodes):
    total = sum(episode.reward for episode in episodes)
    return [replace(episode, reward=episode.reward / total if total else math.inf) for episode in episodes]


class DenominatorOfTheMicrobatch(Composition):
    def loss(self, batch, outputs):
        return super().loss(batch.with_tokens(loss_weights=token_mean(batch)), outputs)


def survivors_counted(minibatch):
    """Count only the tokens that the correction will keep."""
    far = (minibatch["logprobs"] - minibatch["proximal_logprobs"]).abs() > 1
    return token_mean(minibatch.with_tokens(loss_mask=minibatch["loss_mask"] & ~far))


def prompts_counted(minibatch):
    return token_mean(minibatch.with_tokens(loss_mask=torch.ones_like(minibatch["loss_mask"])))


class LearnsFromThePrompt(Composition):
    def loss(self, batch, outputs):
        return LossResult(super().loss(batch, outputs).loss + 0.01 * outputs["logprobs"].sum())


class NoLossSpecs(Composition):
    def updates(self, batch, context):
        yield []


class MeanOfMetrics(Composition):
    def loss(self, batch, outputs):
        result = super().loss(batch, outputs)
        inside = outputs["entropy"].detach()[batch["loss_mask"]]
        result.metrics["entropy"] = Metric.mean(inside.mean() if len(inside) else 0.0)
        return result


class ColumnOfNaN(Composition):
    def prepare(self, batch, context):
        prepared = super().prepare(batch, context)
        return prepared.with_tokens(returns=prepared["advantages"] * math.nan)


class UnknownOutput(Composition):
    def updates(self, batch, context):
        for loss_specs in super().updates(batch, context):
            yield [replace(loss_spec, outputs=("logits",)) for loss_spec in loss_specs]


def over_the_median_deviation(batch):
    """Divide by the median deviation: finite if all rewards are equal, and 1e6 if all but one are."""
    reward, scale = batch["reward"].clone(), torch.zeros(len(batch))
    for group in batch["group_id"].unique():
        members = batch["group_id"] == group
        reward[members] -= reward[members].median()
        scale[members] = reward[members].abs().median()
    return reward / (scale + 1e-6)


MUTANTS = [
    (AdvantageSuite, over_the_median_deviation, "test_one_outlier_keeps_advantages_bounded", r"an advantage is 1e\+06"),
    (AdvantageSuite, positional_groups, "test_groups_are_known_by_their_id", "order of sequences matters"),
    (AdvantageSuite, number_of_group_used, "test_group_ids_are_only_names", "numbers of groups matter"),
    (AdvantageSuite, whole_batch_centered, "test_groups_are_independent", "influence each other"),
    (AdvantageSuite, trajectories_counted, "test_an_episode_counts_once", "three trajectories counts more"),
    (AdvantageSuite, no_spread_divided, "test_equal_rewards_are_finite", "rewards that all are"),
    (AdvantageSuite, in_place, "test_the_batch_stays_as_it_was", "changed the batch"),
    (AdvantageSuite, advantage_with_gradient, "test_one_number_for_each_sequence_or_token", "carries gradients"),
    (AdvantageSuite, advantage_in_double, "test_one_number_for_each_sequence_or_token", "dtype"),
    (PolicyLossSuite, normalized_in_the_loss, "test_a_split_changes_nothing", "depend on the micro-batch"),
    (
        PolicyLossSuite,
        gradient_through_the_advantage,
        "test_the_gradient_on_policy_is_the_policy_gradient",
        "not that of REINFORCE",
    ),
    (PolicyLossSuite, sign_of_the_loss, "test_the_sign_is_right", "less probable"),
    (PolicyLossSuite, prompt_tokens_in_the_ratio, "test_tokens_out_of_the_mask_do_not_matter", "influence others"),
    (PolicyLossSuite, mean_instead_of_tokens, "test_one_loss_for_each_token", "shape"),
    (PolicyLossSuite, ratio_that_overflows, "test_one_loss_for_each_token", "not finite at a distance"),
    (PolicyLossSuite, without_gradient, "test_one_loss_for_each_token", "no gradient for the current policy"),
    (CorrectionSuite, denominators_after_masking, "test_denominators_stay_as_they_are", "weights of others"),
    (CorrectionSuite, denominators_after_masking, "test_a_split_changes_nothing", "depend on the micro-batch"),
    (CorrectionSuite, weights_with_gradient, "test_one_weight_for_each_token", "carry gradients"),
    (CorrectionSuite, weights_that_overflow, "test_one_weight_for_each_token", "weights such as"),
    (CorrectionSuite, half_on_policy, "test_on_policy_weights_are_1", "are not 1"),
    (GroupFilterSuite, drops_by_first, "test_the_order_of_siblings_does_not_matter", "judged differently"),
    (GroupFilterSuite, keeps_the_best, "test_a_group_stays_a_group", "1 episodes for 2"),
    (GroupFilterSuite, shapes_in_place, "test_a_group_stays_a_group", "changed the episodes in place"),
    (RewardShapingSuite, divides_by_the_sum, "test_a_group_stays_a_group", "a reward of inf"),
    (GroupFilterSuite, lambda episodes: episodes, "test_examples", "dropped is False"),
    (GroupFilterSuite, halved, "test_examples", "become"),
]
SPLIT, POLICY_GRADIENT = "test_any_split_gives_the_same", "test_the_gradient_on_policy_is_the_policy_gradient"
MASK = "test_tokens_out_of_the_loss_mask_are_not_learned_from"
ALGORITHMS = [
    (lambda: Composition(advantage=positional_groups), "test_any_order_of_sequences_gives_the_same", "order of seq"),
    (DenominatorOfTheMicrobatch, SPLIT, "values differ"),
    (MeanOfMetrics, SPLIT, "entropy is"),
    (lambda: Composition(policy_loss=normalized_in_the_loss), SPLIT, "values differ"),
    (lambda: Composition(correction=denominators_after_masking), SPLIT, "values differ"),
    (lambda: Composition(policy_loss=gradient_through_the_advantage), POLICY_GRADIENT, "not REINFORCE"),
    (lambda: Composition(policy_loss=sign_of_the_loss), POLICY_GRADIENT, "not REINFORCE"),
    (
        lambda: Composition(loss_aggregation=survivors_counted),
        "test_denominators_come_before_masking",
        "depend on the policies",
    ),
    (lambda: Composition(loss_aggregation=prompts_counted), MASK, "outside the mask has a weight"),
    (LearnsFromThePrompt, MASK, "tokens out of the mask have a gradient"),
    (NoLossSpecs, "test_declarations_are_valid", "no loss spec"),
    (UnknownOutput, "test_declarations_are_valid", "logits"),
    (ColumnOfNaN, "test_prepare_adds_numbers", "not finite"),
]


@pytest.mark.parametrize(("suite", "mutant", "test", "message"), MUTANTS)
def test_a_broken_part_fails_its_test(suite, mutant, test, message):
    class Suite(suite):
        examples = (([0, 1], [0, 1]), ([1, 1], None))

        def make(self):
            return mutant

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)()


@pytest.mark.parametrize(("mutant", "test", "message"), ALGORITHMS)
def test_a_broken_algorithm_fails_its_test(mutant, test, message):
    class Suite(AlgorithmSuite):
        def make(self):
            return mutant()

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)()


def test_policy_gradient_logs_statistics_of_advantages_and_refuses_values_that_are_not_finite():
    suite = AlgorithmSuite()
    batch, context = suite.make_batch(), suite.context()
    Composition().prepare(batch, context)
    logged = {
        name: number for key, metric in context.metrics.items() for name, number in metric.as_numbers(key).items()
    }
    advantages = centered(batch)[batch.tokens.row_index][batch["loss_mask"]]
    assert logged["advantage_mean"] == pytest.approx(float(advantages.mean()), abs=1e-6)
    assert logged["advantage_magnitude"] == pytest.approx(float(advantages.abs().mean()))
    assert logged["advantage_largest"] == float(advantages.abs().max())
    with pytest.raises(RunError, match=r"the advantage '.*:centered' gave \d+ values that are NaN or infinite"):
        Composition(advantage=lambda batch: batch["reward"] * math.nan).prepare(batch, context)
