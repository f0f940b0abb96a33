"""Test the suites of workflows and rewards: correct components pass, and each broken one fails its test."""

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

# Correct components.


class Counting:
    """An environment of three turns. The reward of a turn counts the letters a."""

    async def reset(self, row):
        self.turns = 0
        return [{"role": "user", "content": "count"}]

    async def step(self, completion):
        self.turns += 1
        return ("go on" if self.turns < 3 else None), float(completion.count("a"))


class Plain:
    """A workflow with one answer to a text prompt."""

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


class TokenizedAgain(Plain):
    """Decodes and encodes the answer, which changes some tokens."""

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
    """Drops the stop token, so that the policy never learns to end."""

    def trajectory(self, ids, generation):
        parts = (generation.output_ids, generation.logprobs, generation.versions)
        return Trajectory.from_generation(ids, Generation(*(part[:-1] for part in parts), generation.finish_reason))


class PromptInTheLoss(Plain):
    def trajectory(self, ids, generation):
        trajectory = super().trajectory(ids, generation)
        trajectory.tokens["loss_mask"][:] = True
        return trajectory


class LogprobsLost(Plain):
    def trajectory(self, ids, generation):
        trajectory = super().trajectory(ids, generation)
        trajectory.tokens["logprobs"] = np.zeros_like(trajectory.tokens["logprobs"])
        return trajectory


class OneVersionForAll(Plain):
    def trajectory(self, ids, generation):
        trajectory = super().trajectory(ids, generation)
        trajectory.tokens["versions"][trajectory.tokens["loss_mask"]] = max(generation.versions)
        return trajectory


class SharedRow(Plain):
    async def run_episode(self, row, context):
        self.row = row
        return await super().run_episode(row, context)

    async def score(self, row, context, generation):
        return len(self.row["prompt"]) + await super().score(row, context, generation)


class SharedTokens(Plain):
    """Shares a builder between episodes."""

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


class NoTrajectory(Plain):
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


SAMPLED, INDEPENDENT = (
    "test_sampled_tokens_are_kept_unchanged",
    "test_concurrent_episodes_are_independent",
)
WORKFLOWS = [
    (TokenizedAgain, SAMPLED, "tokenized again, or cut"),
    (AnswerCutOff, SAMPLED, "tokenized again, or cut"),
    (PromptInTheLoss, SAMPLED, "no generation continued"),
    (LogprobsLost, SAMPLED, "no generation continued"),
    (OneVersionForAll, SAMPLED, "no generation continued"),
    (SharedRow, INDEPENDENT, "reward depends on concurrent episodes"),
    (SharedTokens, INDEPENDENT, "tokens depend on concurrent episodes"),
    (RowChanged, "test_the_row_stays_as_it_was", "changed the row"),
    (RewardOfText, "test_the_reward_is_a_finite_number", "reward is '0.5'"),
    (NoTrajectory, SAMPLED, "at least one trajectory"),
    (CancellationSwallowed, "test_a_cancelled_episode_ends", "as if it had not been cancelled"),
]


@pytest.mark.parametrize(("mutant", "test", "message"), WORKFLOWS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_workflow_fails_its_test(mutant, test, message):
    suite = TestPlain()
    suite.make = mutant
    with pytest.raises(AssertionError, match=message):
        getattr(suite, test)()


class FailsBeforeTheFirstGeneration(Plain):
    async def run_episode(self, row, context):
        raise KeyError("there is no such column")


def test_an_exception_before_the_first_generation_is_raised_immediately():
    suite = TestPlain()
    suite.make = FailsBeforeTheFirstGeneration
    with pytest.raises(KeyError, match="no such column"):
        suite.test_a_cancelled_episode_ends()


def test_a_hidden_failure_of_a_reward_fails_the_suite():
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


def unknown_parameter(completion, solution):
    return exact(completion, solution)


def inverted(completion, answer):
    return 1.0 - exact(completion, answer)


ANYTHING = "test_any_completion_has_a_finite_reward"
REWARDS = [
    (parses_anything, ANYTHING, "invalid literal for int"),
    (not_a_number, ANYTHING, "is not a finite number"),
    (counts_its_calls, "test_the_same_answer_has_the_same_reward", "what was scored before"),
    (random_bonus, "test_the_same_answer_has_the_same_reward", "what was scored before"),
    (changes_the_row, "test_examples", "changed its arguments in place"),
    (slow_on_brackets, ANYTHING, "took"),
    (unknown_parameter, "test_examples", "nor keys of `row`: solution"),
    (inverted, "test_examples", "has the reward 0.0, not 1"),
]


@pytest.mark.parametrize(("mutant", "test", "message"), REWARDS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_reward_fails_its_test(mutant, test, message):
    suite = TestExact()
    suite.make = lambda: mutant
    suite.seconds = 0.3 if message == "took" else 60
    with pytest.raises(Exception, match=message):
        getattr(suite, test)()
