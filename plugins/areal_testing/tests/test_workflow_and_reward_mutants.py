"""The suites of workflows and rewards pass correct ones and catch each of these broken ones where it should."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import ClassVar

import numpy as np
import pytest

from areal_core.data import Episode, FinishReason, Generation, Trajectory, TrajectoryBuilder
from areal_testing.conformance import RewardSuite, WorkflowSuite

# Correct ones.


class Counting:
    """An environment of three turns; asks on until it is told a letter."""

    async def reset(self, row):
        self.turns = 0
        return [{"role": "user", "content": "count"}]

    async def step(self, completion):
        self.turns += 1
        return ("go on" if self.turns < 3 else None), float(completion.count("a"))


class Plain:
    """One answer to a prompt of text."""

    async def run_episode(self, row, context):
        ids = context.tokenizer.encode(row["prompt"])
        generation = await context.generate(ids)
        value = await self.score(row, context, generation)
        return Episode([self.trajectory(ids, generation)], value)

    async def score(self, row, context, generation):
        score = await context.score(
            prompt=row["prompt"],
            completion=context.tokenizer.decode(generation.output_ids),
            completion_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
        )
        return score.value

    def trajectory(self, ids, generation):
        return Trajectory.from_generation(ids, generation)


class TestMultiTurn(WorkflowSuite):
    component = "core/multi_turn"
    settings: ClassVar = {"environment": f"{__file__}:Counting"}
    scores = False


class TestPlain(WorkflowSuite):
    rows = ({"prompt": "4+4="}, {"prompt": "one, two"})

    def make(self):
        return Plain()


def exact(completion, answer):
    return float(completion.strip() == answer)


class TestExact(RewardSuite):
    examples = (("8", 1), (" 8\n", 1), ("9", 0))

    def make(self):
        return exact


# Broken workflows.


class TokenizedAnew(Plain):
    """The answer goes through text and back, as of old; some tokens are not what they were."""

    def trajectory(self, ids, generation):
        again = [ord(letter) for letter in "".join(map(chr, generation.output_ids)).rstrip("\0 ")] + [0]
        count = len(again)
        same = Generation(again, generation.logprobs[:count], generation.versions[:count], FinishReason.STOP)
        return (
            Trajectory.from_generation(ids, same)
            if count == len(generation.output_ids)
            else super().trajectory(ids, Generation(again, [-1.0] * count, [1] * count, FinishReason.STOP))
        )


class AnswerCutOff(Plain):
    """The token that ends the answer is thrown away, so ending is never learned."""

    def trajectory(self, ids, generation):
        parts = (generation.output_ids, generation.logprobs, generation.versions)
        return Trajectory.from_generation(ids, Generation(*(part[:-1] for part in parts), generation.finish_reason))


class PromptLearnedFrom(Plain):
    def trajectory(self, ids, generation):
        made = super().trajectory(ids, generation)
        made.tokens["loss_mask"][:] = True
        return made


class LogprobsLost(Plain):
    def trajectory(self, ids, generation):
        made = super().trajectory(ids, generation)
        made.tokens["logprobs"] = np.zeros_like(made.tokens["logprobs"])
        return made


class OneVersionForAll(Plain):
    def trajectory(self, ids, generation):
        made = super().trajectory(ids, generation)
        made.tokens["versions"][made.tokens["loss_mask"]] = max(generation.versions)
        return made


class StateOfAnEpisode(Plain):
    async def run_episode(self, row, context):
        self.row = row
        return await super().run_episode(row, context)

    async def score(self, row, context, generation):
        return len(self.row["prompt"]) + await super().score(row, context, generation)


class SharedTokens(Plain):
    """The builder belongs to the workflow."""

    async def run_episode(self, row, context):
        self.builder = TrajectoryBuilder()
        self.builder.add_context(context.tokenizer.encode(row["prompt"]))
        generation = await context.generate(self.builder.input_ids)
        value = await super().score(row, context, generation)
        self.builder.add_generation(generation)
        return Episode([self.builder.build()], value)


class RowChanged(Plain):
    async def run_episode(self, row, context):
        row["prompt"] += "?"
        return await super().run_episode(row, context)


class FailureHidden(Plain):
    async def score(self, row, context, generation):
        try:
            return await super().score(row, context, generation)
        except Exception:  # noqa: BLE001 - this mutant hides any failure
            return 0.0


class RewardOfText(Plain):
    async def score(self, row, context, generation):
        return "0.5"


class NothingReturned(Plain):
    async def run_episode(self, row, context):
        return Episode([], 0.0)


class CancellationSwallowed(Plain):
    async def run_episode(self, row, context):
        try:
            return await super().run_episode(row, context)
        except asyncio.CancelledError:
            builder = TrajectoryBuilder()
            builder.add_context([1])
            return Episode([builder.build()], 0.0)


SAMPLED, APART = (
    "test_every_sampled_token_is_there_as_it_was_sampled",
    "test_episodes_at_once_do_not_know_of_each_other",
)
WORKFLOWS = [
    (TokenizedAnew, SAMPLED, "tokenized anew, or cut"),
    (AnswerCutOff, SAMPLED, "tokenized anew, or cut"),
    (PromptLearnedFrom, SAMPLED, "no generation continued"),
    (LogprobsLost, SAMPLED, "no generation continued"),
    (OneVersionForAll, SAMPLED, "no generation continued"),
    (StateOfAnEpisode, APART, "reward depends on the episodes beside it"),
    (SharedTokens, APART, "tokens depend on the episodes beside it"),
    (RowChanged, "test_the_row_stays_as_it_was", "changed the row"),
    (RewardOfText, "test_the_reward_is_a_finite_number", "reward is '0.5'"),
    (NothingReturned, SAMPLED, "at least one trajectory"),
    (CancellationSwallowed, "test_a_cancelled_episode_ends", "as if nothing had happened"),
]


@pytest.mark.parametrize(("mutant", "test", "words"), WORKFLOWS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_workflow_fails_the_test_that_is_meant_to_catch_it(mutant, test, words):
    suite = TestPlain()
    suite.make = mutant
    with pytest.raises(AssertionError, match=words):
        getattr(suite, test)()


class RowUnread(Plain):
    async def run_episode(self, row, context):
        raise KeyError("there is no such column")


def test_what_a_workflow_raises_before_it_asks_for_anything_is_said_at_once():
    suite = TestPlain()
    suite.make = RowUnread
    with pytest.raises(KeyError, match="no such column"):
        suite.test_a_cancelled_episode_ends()


def test_a_hidden_failure_of_a_reward_is_caught():
    suite = TestPlain()
    suite.make = FailureHidden
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        suite.test_a_failing_reward_is_not_hidden()


# Broken rewards.

_COUNT = itertools.count()


def parses_anything(completion, answer):
    return float(int(completion.strip() or 0) == int(answer))


def not_a_number(completion, answer):
    return exact(completion, answer) if len(completion) < 1000 else float("nan")


def counts_its_calls(completion, answer):
    return exact(completion, answer) + (next(_COUNT) > 8)


def random_bonus(completion, answer):
    return exact(completion, answer) + 0.1 * random.random() * (len(completion) > 30)


def changes_the_row(completion, answer, row):
    row.pop("answer")
    return exact(completion, answer)


def slow_on_brackets(completion, answer):
    time.sleep(0.001 * completion.count("("))
    return exact(completion, answer)


def wants_what_is_not_there(completion, solution):
    return exact(completion, solution)


def wrong_by_case(completion, answer):
    return 1.0 - exact(completion, answer)


ANYTHING = "test_anything_that_a_model_writes_has_a_finite_reward"
REWARDS = [
    (parses_anything, ANYTHING, "invalid literal for int"),
    (not_a_number, ANYTHING, "is not a finite number"),
    (counts_its_calls, "test_the_same_answer_has_the_same_reward", "what was scored before"),
    (random_bonus, "test_the_same_answer_has_the_same_reward", "what was scored before"),
    (changes_the_row, "test_examples", "changed what it was given"),
    (slow_on_brackets, ANYTHING, "took"),
    (wants_what_is_not_there, "test_examples", "neither rewards nor `row` have: solution"),
    (wrong_by_case, "test_examples", "is worth 0.0, not 1"),
]


@pytest.mark.parametrize(("mutant", "test", "words"), REWARDS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_reward_fails_the_test_that_is_meant_to_catch_it(mutant, test, words):
    suite = TestExact()
    suite.make = lambda: mutant
    suite.seconds = 0.3 if words == "took" else 60
    with pytest.raises(Exception, match=words):
        getattr(suite, test)()
