"""Test the suites of batch transforms and auxiliary losses: correct components pass, and broken ones fail a test."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from areal_core.data import Metric, group_mean
from areal_core.sdk import ACTOR, REFERENCE, ForwardPass, LossResult, LossSpec
from areal_testing.conformance import AuxiliaryLossSuite, BatchTransformSuite

# Correct components in their simplest form.


def penalty(batch, context):
    """Penalize each token in the loss for its distance from the reference, with a growing coefficient."""
    coefficient = context.state.get("penalty/coefficient", torch.tensor(0.1))
    context.state["penalty/coefficient"] = coefficient * 1.1
    distance = torch.where(batch["loss_mask"], batch["proximal_logprobs"] - batch["reference_logprobs"], 0.0)
    context.log("distance", Metric.mean(distance, batch["loss_mask"]))
    return {"token_rewards": -coefficient * distance}


def centered(batch, context):
    """Return a column with one number for each sequence."""
    return {"centered": batch["reward"] - group_mean(batch, batch["reward"])}


def regression(minibatch, context):
    return LossSpec("critic", minibatch, ("values",), squares)


def squares(batch, outputs):
    mask = batch["loss_mask"]
    error = torch.where(mask, outputs["values"] - batch["returns"], 0.0).square()
    return LossResult((error * batch["loss_weights"]).sum(), {"error": Metric.mean(error, mask)})


POLICIES = (
    ForwardPass(ACTOR, "logprobs", "proximal_logprobs"),
    ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),
)


class TestPenalty(BatchTransformSuite):
    needed = POLICIES

    def make(self):
        return penalty


class TestCentered(BatchTransformSuite):
    def make(self):
        return centered


class TestTransformOfNothing(BatchTransformSuite):
    def make(self):
        return lambda batch, context: {}


class TestRegression(AuxiliaryLossSuite):
    def make(self):
        return regression


# Broken transforms. A class is instantiated for each test.


def mean_of_the_batch(batch, context):
    return {"mean": batch["reward"].mean().reshape(1)}


def with_gradient(batch, context):
    return {"token_rewards": batch["returns"] * torch.ones((), requires_grad=True)}


def in_double(batch, context):
    return {"token_rewards": batch["returns"].double()}


def without_a_bound(batch, context):
    return {"token_rewards": torch.exp(200 * batch["proximal_logprobs"].abs())}


def neighbors(batch, context):
    """Take blocks of three sequences for groups."""
    rewards = batch["reward"].view(-1, 3)
    return {"centered": (rewards - rewards.mean(1, keepdim=True)).flatten()}


def number_of_episode(batch, context):
    return {"token_rewards": batch["returns"] * (batch["episode_id"] % 7)[batch.tokens.row_index]}


def whitened_with_the_prompt(batch, context):
    distance = batch["proximal_logprobs"] - batch["reference_logprobs"]
    return {"token_rewards": (distance - distance.mean()) / distance.std()}


def prompts_in_the_sum(batch, context):
    total = torch.zeros(len(batch)).index_add(0, batch.tokens.row_index, batch["proximal_logprobs"])
    return {"total": total}


def in_place(batch, context):
    batch["reward"].mul_(0.5)
    return {}


class OwnMemory:
    """Keep the coefficient in an attribute, so that a resumed run starts with the initial one."""

    def __init__(self):
        self._coefficient = 0.1

    def __call__(self, batch, context):
        self._coefficient *= 1.1
        return {"token_rewards": self._coefficient * batch["returns"]}


def number_in_the_state(batch, context):
    context.state["penalty/coefficient"] = 0.1
    return {}


def name_without_an_owner(batch, context):
    context.state["coefficient"] = torch.ones(())
    return {}


def other_every_time(batch, context):
    return {"token_rewards": batch["returns"] * random.random()}


def logs_a_number(batch, context):
    context.metrics["distance"] = 0.1
    return {}


def logs_no_number(batch, context):
    context.log("distance", Metric.mean(math.nan))
    return {}


COLUMNS, ORDER = "test_columns_of_the_batch", "test_any_order_of_sequences_gives_the_same"
IDS, MASK = "test_ids_are_only_names", "test_tokens_out_of_the_loss_mask_do_not_matter"
STATE, LOGS = "test_its_state_survives_a_resume", "test_metrics_are_finite"
TRANSFORMS = [
    (mean_of_the_batch, COLUMNS, "'mean' has 1 values"),
    (with_gradient, COLUMNS, "carries gradients"),
    (in_double, COLUMNS, "float64"),
    (without_a_bound, COLUMNS, "not finite"),
    (neighbors, ORDER, "order of sequences matters"),
    (number_of_episode, IDS, "numbers of groups or episodes matter"),
    (whitened_with_the_prompt, MASK, "influence others"),
    (prompts_in_the_sum, MASK, "influence others"),
    (in_place, "test_the_batch_stays_as_it_was", "changed the batch"),
    (OwnMemory, STATE, "after 1 resumes"),
    (number_in_the_state, STATE, "only tensors"),
    (name_without_an_owner, STATE, "without a '/'"),
    (other_every_time, STATE, "after 0 resumes"),
    (logs_a_number, LOGS, "not a Metric"),
    (logs_no_number, LOGS, "'distance' is logged as nan"),
]

# Broken auxiliary losses.


def list_of_loss_specs(minibatch, context):
    return [regression(minibatch, context)]


def unknown_role(minibatch, context):
    return replace(regression(minibatch, context), role="oracle")


def unknown_output(minibatch, context):
    return replace(regression(minibatch, context), outputs=("values", "logits"))


def no_outputs(minibatch, context):
    return replace(regression(minibatch, context), outputs=())


def altered(minibatch, context, *, loss):
    return LossSpec("critic", minibatch, ("values",), loss)


def mean_of_the_microbatch(batch, outputs):
    result = squares(batch, outputs)
    return LossResult(result.loss / batch["loss_weights"].sum().clamp(min=1e-6), result.metrics)


def mean_of_metrics(batch, outputs):
    result = squares(batch, outputs)
    return LossResult(result.loss, {"error": Metric.mean(result.loss / batch["loss_weights"].sum().clamp(min=1e-6))})


def not_a_number_logged(batch, outputs):
    return LossResult(squares(batch, outputs).loss, {"error": Metric.sum(math.nan)})


def prompt_learned(batch, outputs):
    result = squares(batch, outputs)
    return LossResult(result.loss + 0.01 * outputs["values"].square().sum(), result.metrics)


def targets_of_the_prompt(minibatch, context):
    """Center returns over all tokens."""
    returns = minibatch["returns"] - minibatch["returns"].mean()
    return regression(minibatch.with_tokens(returns=returns), context)


def first_sequences_more(minibatch, context):
    weights = 1 / (1 + torch.arange(len(minibatch)).float())[minibatch.tokens.row_index]
    return regression(minibatch.with_tokens(loss_weights=minibatch["loss_weights"] * weights), context)


def weights_of_its_own(minibatch, context):
    return regression(minibatch.with_tokens(loss_weights=minibatch["loss_mask"].float() / 100), context)


def learns_nothing(batch, outputs):
    return LossResult(0.0 * outputs["values"].sum())


def in_place_of_the_minibatch(minibatch, context):
    minibatch["returns"].clamp_(-1, 1)
    return regression(minibatch, context)


DECLARATIONS, SPLIT = "test_declarations_are_valid", "test_any_split_gives_the_same"
LEARNS, WEIGHTS = "test_tokens_out_of_the_loss_mask_are_not_learned_from", "test_tokens_count_by_their_weights"
AUXILIARY_LOSSES = [
    (list_of_loss_specs, DECLARATIONS, "not a LossSpec"),
    (unknown_role, DECLARATIONS, "no such role: 'oracle'"),
    (unknown_output, DECLARATIONS, "logits"),
    (no_outputs, DECLARATIONS, "no outputs"),
    (partial(altered, loss=not_a_number_logged), DECLARATIONS, "is logged as nan"),
    (partial(altered, loss=mean_of_the_microbatch), SPLIT, "values differ"),
    (partial(altered, loss=mean_of_metrics), SPLIT, "error is"),
    (partial(altered, loss=learns_nothing), SPLIT, "no gradient anywhere"),
    (first_sequences_more, ORDER, "order of sequences matters"),
    (partial(altered, loss=prompt_learned), LEARNS, "tokens out of the mask have a gradient"),
    (targets_of_the_prompt, LEARNS, "influence others"),
    (weights_of_its_own, WEIGHTS, "does not follow the tokens' weights"),
    (in_place_of_the_minibatch, "test_the_minibatch_stays_as_it_was", "changed the minibatch"),
]


@pytest.mark.parametrize(("mutant", "test", "message"), TRANSFORMS)
def test_a_broken_transform_fails_its_test(mutant, test, message):
    class Suite(BatchTransformSuite):
        needed = POLICIES

        def make(self):
            return mutant() if isinstance(mutant, type) else mutant

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)()


@pytest.mark.parametrize(("mutant", "test", "message"), AUXILIARY_LOSSES)
def test_a_broken_auxiliary_loss_fails_its_test(mutant, test, message):
    class Suite(AuxiliaryLossSuite):
        def make(self):
            return mutant

    with pytest.raises(AssertionError, match=message):
        getattr(Suite(), test)()


def test_every_test_of_a_suite_has_a_mutant():
    for suite, mutants in ((BatchTransformSuite, TRANSFORMS), (AuxiliaryLossSuite, AUXILIARY_LOSSES)):
        tests = {name for name in dir(suite) if name.startswith("test_")}
        assert tests == {test for _, test, _ in mutants}
