"""The suites of loss aggregations, regularizers and example tokenizers pass correct ones and catch each of these."""

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


OF_THE_REFERENCE = (ForwardPass(REFERENCE, "logprobs", "reference_logprobs"),)


class TestPull(RegularizerSuite):
    needed = OF_THE_REFERENCE

    def make(self):
        return pull


def to_the_average(terms):
    return torch.where(terms.mask, terms.logprobs - terms.columns["average_logprobs"], 0.0).square(), {}


to_the_average.needs = lambda updates: (ForwardPass(Role("average", ema=EMA("actor")), "logprobs", "average_logprobs"),)


class TestPullToARoleOfItsOwn(RegularizerSuite):
    """The columns of the passes that a component needs are there."""

    component = f"{__file__}:to_the_average"


class TestBonus(RegularizerSuite):
    def make(self):
        return bonus


def lesson(row, tokenizer):
    """The prompt, and the answer, which is learned."""
    if "prompt" not in row or not isinstance(row["prompt"], str):
        raise ValueError("a lesson needs the keys 'prompt' and 'answer', both text")
    said = tokenizer.encode(row["answer"])
    generation = Generation(said, [0.0] * len(said), [-1] * len(said), FinishReason.STOP)
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


def without_care(minibatch):
    return minibatch["loss_mask"] / minibatch["loss_mask"].sum()


def in_double(minibatch):
    return token_mean(minibatch).double()


def microbatch_mean(terms):
    return pull(terms)[0] - pull(terms)[0].mean(), {}


def for_winners(terms):
    return pull(terms)[0] * (terms.advantages > 0), {}


def detached(terms):
    return pull(replace(terms, logprobs=terms.logprobs.detach()))


def of_prompts_too(terms):
    return (terms.logprobs - terms.row_mean(terms.logprobs.where(terms.mask, 1.0))[terms.row_index].mean()).square(), {}


def overflowing(terms):
    return torch.exp(12 * (terms.logprobs - terms.columns["reference_logprobs"]).abs()), {}


_calls = itertools.count()


def learns_all(row, tokenizer):
    (found,) = lesson(row, tokenizer)
    found.tokens["loss_mask"][:] = True
    return [found]


def learns_nothing(row, tokenizer):
    (found,) = lesson(row, tokenizer)
    found.tokens["loss_mask"][:] = False
    return [found]


def twice(row, tokenizer):
    return lesson(row, tokenizer) * 2


def changing(row, tokenizer):
    row.setdefault("seen", 0)
    return lesson(row, tokenizer)


def by_chance(row, tokenizer):
    return lesson({**row, "answer": row["answer"] + "xyz"[next(_calls) % 3]} if "answer" in row else row, tokenizer)


def odd_keys(row, tokenizer):
    (found,) = lesson(row, tokenizer)
    if row["prompt"] == "a":
        found.sequence["weight"] = torch.ones(())
    return [found]


def forgiving(row, tokenizer):
    return lesson({"prompt": "x", "answer": "y"} | {k: v for k, v in row.items() if isinstance(v, str)}, tokenizer)


def curt(row, tokenizer):
    if not isinstance(row.get("prompt"), str):
        raise KeyError("prompt")
    return lesson(row, tokenizer)


ONE, SPLIT, MASK = (
    "test_one_loss_for_each_token",
    "test_a_split_changes_nothing",
    "test_tokens_out_of_the_mask_do_not_matter",
)
WEIGHT, UNITS = "test_one_weight_for_each_token_of_the_loss", "test_rows_become_units"
MUTANTS = [
    (LossAggregationSuite, summed, "test_a_mean_of_equal_losses_is_not_larger_than_one_of_them", "a sum, no mean"),
    (LossAggregationSuite, prompts_too, WEIGHT, "out of the mask has a weight"),
    (LossAggregationSuite, in_double, WEIGHT, "dtype"),
    (LossAggregationSuite, by_position, "test_the_order_of_sequences_does_not_matter", "order of sequences matters"),
    (LossAggregationSuite, by_probability, "test_only_the_shape_of_a_batch_counts", "what tokens are"),
    (LossAggregationSuite, without_care, "test_a_batch_without_a_token_in_the_loss", "no token is in the loss"),
    (RegularizerSuite, detached, ONE, "no gradient"),
    (RegularizerSuite, overflowing, ONE, "not finite at a distance"),
    (RegularizerSuite, microbatch_mean, SPLIT, "depend on the micro-batch"),
    (RegularizerSuite, of_prompts_too, SPLIT, "depend on the micro-batch"),
    (RegularizerSuite, for_winners, "test_it_does_not_know_the_advantage", "other advantages"),
    (ExampleTokenizerSuite, learns_all, UNITS, "the first token is in the loss"),
    (ExampleTokenizerSuite, learns_nothing, UNITS, "nothing is learned"),
    (ExampleTokenizerSuite, twice, UNITS, "became 2 sequences"),
    (ExampleTokenizerSuite, changing, "test_a_row_is_read_and_nothing_more", "changed the row"),
    (ExampleTokenizerSuite, by_chance, "test_a_row_is_read_and_nothing_more", "encoded differently"),
    (ExampleTokenizerSuite, odd_keys, "test_rows_of_every_form_fit_into_one_batch", "weight"),
    (ExampleTokenizerSuite, forgiving, "test_a_row_of_another_form_is_refused", "DID NOT RAISE"),
    (ExampleTokenizerSuite, curt, "test_a_row_of_another_form_is_refused", "says too little"),
]


@pytest.mark.parametrize(("suite", "mutant", "test", "words"), MUTANTS)
def test_a_broken_part_fails_the_test_that_is_meant_to_catch_it(suite, mutant, test, words):
    class Suite(suite):
        rows = ROWS
        needed = OF_THE_REFERENCE

        def make(self):
            return mutant

    with pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception), match=words):
        getattr(Suite(), test)()
