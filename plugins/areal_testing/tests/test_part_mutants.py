"""Test the suites of loss aggregations, regularizers and example tokenizers: each broken component fails a test."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from areal_core.algorithms.loss_aggregation import token_mean
from areal_core.data import FinishReason, Generation, Trajectory
from areal_core.sdk import EMA, REFERENCE, ForwardPass, Role
from areal_testing.conformance import ExampleTokenizerSuite, LossAggregationSuite, RegularizerSuite


class TestTokenMean(LossAggregationSuite):
    component = "core/token_mean"


class TestSequenceMean(LossAggregationSuite):
    component = "core/sequence_mean"


class TestEpisodeMean(LossAggregationSuite):
    component = "core/episode_mean"


class TestConstantLength(LossAggregationSuite):
    component = "core/constant_length"
    settings: ClassVar = {"length": 16}


def pull(terms):
    return torch.where(terms.mask, terms.logprobs - terms.columns["reference_logprobs"], 0.0).square(), {}


def bonus(terms):
    return torch.where(terms.mask, -0.1 * terms.entropy, 0.0), {}


REFERENCE_LOGPROBS = (ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),)


class TestPull(RegularizerSuite):
    needed = REFERENCE_LOGPROBS

    def make(self):
        return pull


def average_distance(terms):
    return torch.where(terms.mask, terms.logprobs - terms.columns["average_logprobs"], 0.0).square(), {}


average_distance.needs = lambda updates: (
    ForwardPass(Role("average", ema=EMA("actor")), "logprobs", "average_logprobs"),
)


class TestPullToAverage(RegularizerSuite):
    """The suite adds the columns of a role that the component defines."""

    component = f"{__file__}:average_distance"


class TestBonus(RegularizerSuite):
    def make(self):
        return bonus


def lesson(row, tokenizer):
    """Return one sequence: the prompt, and the answer, which is in the loss."""
    if "prompt" not in row or not isinstance(row["prompt"], str):
        raise ValueError("a lesson needs the keys 'prompt' and 'answer', both text")
    ids = tokenizer.encode(row["answer"])
    generation = Generation(ids, [0.0] * len(ids), [-1] * len(ids), FinishReason.STOP)
    return [Trajectory.from_generation(tokenizer.encode(row["prompt"]), generation)]


ROWS = ({"prompt": "what", "answer": "that"}, {"prompt": "a", "answer": "b"})


class TestLesson(ExampleTokenizerSuite):
    rows = ROWS

    def make(self):
        return lesson


def summed(minibatch):
    return minibatch["loss_mask"].float()


def prompts_too(minibatch):
    return torch.full((minibatch.token_count,), 1 / minibatch.token_count)


def by_position(minibatch):
    weights = token_mean(minibatch) * torch.linspace(0.5, 1.5, minibatch.token_count)
    return weights / weights.sum()


def by_probability(minibatch):
    return token_mean(minibatch) * minibatch["logprobs"].exp()


def divides_by_zero(minibatch):
    return minibatch["loss_mask"] / minibatch["loss_mask"].sum()


def in_double(minibatch):
    return token_mean(minibatch).double()


def microbatch_mean(terms):
    return pull(terms)[0] - pull(terms)[0].mean(), {}


def by_advantage(terms):
    return pull(terms)[0] * (terms.advantages > 0), {}


def detached(terms):
    return pull(replace(terms, logprobs=terms.logprobs.detach()))


def with_prompt_tokens(terms):
    return (terms.logprobs - terms.row_mean(terms.logprobs.where(terms.mask, 1.0))[terms.row_index].mean()).square(), {}


def overflowing(terms):
    return torch.exp(12 * (terms.logprobs - terms.columns["reference_logprobs"]).abs()), {}


_calls = itertools.count()


def learns_all(row, tokenizer):
    (trajectory,) = lesson(row, tokenizer)
    trajectory.tokens["loss_mask"][:] = True
    return [trajectory]


def learns_nothing(row, tokenizer):
    (trajectory,) = lesson(row, tokenizer)
    trajectory.tokens["loss_mask"][:] = False
    return [trajectory]


def twice(row, tokenizer):
    return lesson(row, tokenizer) * 2


def changing(row, tokenizer):
    row.setdefault("seen", 0)
    return lesson(row, tokenizer)


def by_chance(row, tokenizer):
    return lesson({**row, "answer": row["answer"] + "xyz"[next(_calls) % 3]} if "answer" in row else row, tokenizer)


def odd_keys(row, tokenizer):
    (trajectory,) = lesson(row, tokenizer)
    if row["prompt"] == "a":
        trajectory.sequence["weight"] = torch.ones(())
    return [trajectory]


def forgiving(row, tokenizer):
    return lesson({"prompt": "x", "answer": "y"} | {k: v for k, v in row.items() if isinstance(v, str)}, tokenizer)


def unhelpful_error(row, tokenizer):
    if not isinstance(row.get("prompt"), str):
        raise KeyError("prompt")
    return lesson(row, tokenizer)


ONE, SPLIT, MASK = (
    "test_one_loss_for_each_token",
    "test_a_split_changes_nothing",
    "test_tokens_out_of_the_mask_do_not_matter",
)
WEIGHT, GROUPS = "test_one_weight_for_each_token_of_the_loss", "test_rows_become_sequence_groups"
MUTANTS = [
    (LossAggregationSuite, summed, "test_weights_are_those_of_a_mean", "a sum, no mean"),
    (LossAggregationSuite, prompts_too, WEIGHT, "outside the mask has a weight"),
    (LossAggregationSuite, in_double, WEIGHT, "dtype"),
    (LossAggregationSuite, by_position, "test_the_order_of_sequences_does_not_matter", "order of sequences matters"),
    (LossAggregationSuite, by_probability, "test_weights_do_not_depend_on_values", "on tokens"),
    (LossAggregationSuite, divides_by_zero, "test_an_empty_loss_mask_has_weights_of_0", "no token is in the loss"),
    (RegularizerSuite, detached, ONE, "no gradient"),
    (RegularizerSuite, overflowing, ONE, "not finite at a distance"),
    (RegularizerSuite, microbatch_mean, SPLIT, "depend on the micro-batch"),
    (RegularizerSuite, with_prompt_tokens, SPLIT, "depend on the micro-batch"),
    (RegularizerSuite, by_advantage, "test_it_does_not_depend_on_the_advantage", "other advantages"),
    (ExampleTokenizerSuite, learns_all, GROUPS, "the first token is in the loss"),
    (ExampleTokenizerSuite, learns_nothing, GROUPS, "no token of .* is in the loss"),
    (ExampleTokenizerSuite, twice, GROUPS, "became 2 sequences"),
    (ExampleTokenizerSuite, changing, "test_the_result_depends_only_on_the_row", "changed the row"),
    (ExampleTokenizerSuite, by_chance, "test_the_result_depends_only_on_the_row", "encoded differently"),
    (ExampleTokenizerSuite, odd_keys, "test_rows_of_every_form_fit_into_one_batch", "weight"),
    (ExampleTokenizerSuite, forgiving, "test_an_invalid_row_is_refused", "DID NOT RAISE"),
    (ExampleTokenizerSuite, unhelpful_error, "test_an_invalid_row_is_refused", "does not name what is needed"),
]


@pytest.mark.parametrize(("suite", "mutant", "test", "message"), MUTANTS)
def test_a_broken_component_fails_its_test(suite, mutant, test, message):
    class Suite(suite):
        rows = ROWS
        needed = REFERENCE_LOGPROBS

        def make(self):
            return mutant

    with pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception), match=message):
        getattr(Suite(), test)()
