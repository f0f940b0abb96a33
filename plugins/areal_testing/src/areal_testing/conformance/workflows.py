"""Conformance suite of workflows: episodes from rows, generations and rewards."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_core.data import Episode, FinishReason, Generation, PackedBatch, Trajectory
from areal_core.sdk import RewardScore, WorkflowContext
from areal_testing.conformance.components import ComponentSuite
from areal_testing.conformance.templates import TemplateTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_NEW_TOKENS = 24


class RewardFailedError(Exception):
    """Raised on purpose by a reward of the suite."""


@dataclass
class Recorder:
    """A fake model and reward of one episode, which record their calls.

    Args:
        seed: seed of the generated text.
        text: characters of the generated text.
        stop: token that ends a turn.
        delays: True to wait a random time before each generation.
        fails: True to raise `RewardFailedError` in `score`.

    Attributes:
        generated: pairs of a prompt's token ids and the generation for it, in the order of the calls.
        limits: `max_new_tokens` of each call.
    """

    seed: int
    text: str
    stop: int
    delays: bool = True
    fails: bool = False
    generated: list[tuple[list[int], Generation]] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)

    async def generate(
        self,
        input_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        images: Sequence[object] = (),
    ) -> Generation:
        """Return text that follows from seed and prompt, with random log-probabilities and versions.

        The parameters are those of the runtime's `generate`. Images are ignored.
        """
        draw = random.Random(f"{self.seed}-{list(input_ids)}")
        prompt = list(input_ids)
        self.limits.append(max_new_tokens)
        if self.delays:
            await asyncio.sleep(random.Random(f"{draw.getstate()}").random() / 100)
        most = MAX_NEW_TOKENS if max_new_tokens is None else min(MAX_NEW_TOKENS, max_new_tokens)
        count = draw.randint(2, 12)
        ids = [ord(draw.choice(self.text)) for _ in range(count)] + [self.stop]
        written = "".join(map(chr, ids))
        ids = ids[: min([len(ids), *(written.find(text) + len(text) for text in stop if text in written)])]
        reason = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        ids = ids[:most]
        logprobs = [-draw.random() - 0.01 for _ in ids]
        generation = Generation(ids, logprobs, [draw.randint(1, 9) for _ in ids], reason)
        self.generated.append((prompt, copy.deepcopy(generation)))
        return generation

    async def score(
        self,
        *,
        prompt: str,
        completion: str,
        completion_ids: list[int],
        finish_reason: FinishReason,
        prompt_ids: Sequence[int] | None = None,
    ) -> RewardScore:
        """Return a reward that follows from the completion. The parameters are those of the runtime's `score`."""
        texts = {"prompt": prompt, "completion": completion}
        for name, text in texts.items():
            assert isinstance(text, str), f"score was called with a {name} that is {type(text).__name__}, not text"
        assert isinstance(finish_reason, FinishReason), f"score was called with finish_reason={finish_reason!r}"
        assert list(completion_ids) in [generation.output_ids for _, generation in self.generated], (
            "score was called with completion_ids of no generation"
        )
        if prompt_ids is not None:
            assert list(prompt_ids) in [generated_prompt for generated_prompt, _ in self.generated], (
                "score was called with prompt_ids of no generation"
            )
        if self.fails:
            raise RewardFailedError
        value = random.Random(completion).random()
        return RewardScore(value, {"made": value})


class WorkflowSuite(ComponentSuite):
    """Tests of a workflow. Set `component` (and `settings`) and `rows`, or override `make`.

    Attributes:
        rows: rows of the data set. Every test plays each of them.
        letters: characters of the fake model's text. Add those to which the workflow reacts.
        scores: True if the workflow calls `score`. Set False if its environment computes the rewards.
        patience_s: seconds after which a wait fails the test.
    """

    kind: ClassVar[str] = "workflows"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"prompt": "4+4=", "answer": "8"},
        {"prompt": [{"role": "user", "content": "What is 3 + 9?"}], "answer": "12"},
    )
    letters = "0123456789 abc"
    scores = True
    patience_s = 240.0

    def make_tokenizer(self) -> Any:
        """Return a tokenizer with one token for each character and a plain chat template."""
        return TemplateTokenizer()

    def recorder(self, seed: int, **options: Any) -> Recorder:
        """Return the fake model and reward of one episode."""
        return Recorder(seed, self.letters, self.make_tokenizer().eos_token_id, **options)

    async def play(self, workflow: Any, row: Mapping[str, Any], recorder: Recorder, index: int = 0) -> Episode:
        """Play one episode and check its type. Return it."""
        context = WorkflowContext(
            tokenizer=self.make_tokenizer(),
            generate=recorder.generate,
            score=recorder.score,
            is_evaluation=False,
            sample_index=index,
        )
        episode = await workflow.run_episode(row, context)
        assert isinstance(episode, Episode), f"run_episode returned {type(episode).__name__}, not an Episode"
        assert episode.trajectories, "an episode needs at least one trajectory"
        return episode

    def test_sampled_tokens_are_kept_unchanged(self) -> None:
        """Each sampled token has its log-probability and version, and follows exactly the tokens of its prompt."""
        workflow = self.make()
        for seed, row in enumerate(list(self.rows) * 5):
            recorder = self.recorder(seed, delays=False)
            episode = asyncio.run(self.play(workflow, row, recorder))
            assert recorder.generated, "the workflow generated nothing"
            sampled = 0
            for trajectory in episode.trajectories:
                sampled += _check_trajectory(trajectory, recorder.generated)
            assert sampled, "no trajectory has a token that the policy sampled"

    def test_the_reward_is_a_finite_number(self) -> None:
        """The reward and its components are finite numbers."""
        workflow = self.make()
        for seed, row in enumerate(self.rows):
            episode = asyncio.run(self.play(workflow, row, self.recorder(seed)))
            for name, value in {"reward": episode.reward, **episode.rewards}.items():
                assert isinstance(value, int | float), f"{name} is {value!r}"
                assert math.isfinite(value), f"{name} is {value!r}"

    def test_concurrent_episodes_are_independent(self) -> None:
        """One object plays all episodes, so it must hold no state of an episode."""
        workflow = self.make()
        played = [(row, seed) for seed in range(6) for row in self.rows]

        async def together() -> list[Episode]:
            work = [self.play(workflow, row, self.recorder(seed), seed) for row, seed in played]
            return list(await asyncio.gather(*work))

        for (row, seed), concurrent in zip(played, asyncio.run(together()), strict=True):
            alone = asyncio.run(self.play(self.make(), row, self.recorder(seed, delays=False), seed))
            assert concurrent.reward == alone.reward, "an episode's reward depends on concurrent episodes"
            packed = [PackedBatch.from_trajectories(e.trajectories).to_bytes() for e in (concurrent, alone)]
            assert packed[0] == packed[1], "an episode's tokens depend on concurrent episodes"

    def test_the_row_stays_as_it_was(self) -> None:
        """The workflow does not change the row, which other episodes and later epochs use."""
        workflow = self.make()
        for row in self.rows:
            passed = copy.deepcopy(dict(row))
            asyncio.run(self.play(workflow, passed, self.recorder(1)))
            assert passed == row, "the workflow changed the row of the data set"

    def test_a_failing_reward_is_not_hidden(self) -> None:
        """The workflow does not catch an exception of `score`: the policy would learn from a default reward."""
        if not self.scores:
            pytest.skip("the workflow does not ask for the run's rewards")
        with pytest.raises(RewardFailedError):
            asyncio.run(self.play(self.make(), self.rows[0], self.recorder(1, fails=True)))

    def test_a_cancelled_episode_ends(self) -> None:
        """A cancelled episode ends immediately, without a result."""

        async def check() -> None:
            recorder = self.recorder(1)
            reached = asyncio.Event()

            async def never(input_ids: list[int], **options: Any) -> Generation:
                reached.set()
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

            recorder.generate = never  # type: ignore[method-assign]
            task = asyncio.ensure_future(self.play(self.make(), self.rows[0], recorder))
            started = asyncio.ensure_future(reached.wait())
            await asyncio.wait({task, started}, timeout=self.patience_s, return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if task.done():
                task.result()  # raises the exception of an episode that failed before its first generation
            assert reached.is_set(), "the episode asked for no generation"
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=self.patience_s)
            assert done, "a cancelled episode did not end"
            assert task.cancelled(), "a cancelled episode ended as if it had not been cancelled"

        asyncio.run(check())


def _check_trajectory(trajectory: Trajectory, generated: Sequence[tuple[list[int], Generation]]) -> int:
    """Assert that each masked token belongs to a generation for exactly the tokens before it. Return their number."""
    values = {key: value.tolist() for key, value in trajectory.tokens.items()}
    ids, mask = values["input_ids"], values["loss_mask"]
    position = 0
    while position < len(ids):
        if not mask[position]:
            assert values["logprobs"][position] == 0, "a token that was not sampled has a log-probability"
            assert values["versions"][position] == -1, "a token that was not sampled has a version"
            position += 1
            continue
        fitting = [g for prompt, g in generated if prompt == ids[:position] and _fits(g, values, position)]
        assert fitting, (
            f"the tokens from {position} on are marked as sampled, but no generation continued the {position} tokens "
            "before them with these ids, log-probabilities and versions: were they tokenized again, or cut?"
        )
        position += len(fitting[0].output_ids)
    return sum(mask)


def _fits(generation: Generation, values: dict[str, list[Any]], position: int) -> bool:
    end = position + len(generation.output_ids)
    is_close = all(
        abs(a - b) < 1e-6 for a, b in zip(values["logprobs"][position:end], generation.logprobs, strict=False)
    )
    is_same = values["input_ids"][position:end] == generation.output_ids and all(values["loss_mask"][position:end])
    return is_same and is_close and values["versions"][position:end] == generation.versions
