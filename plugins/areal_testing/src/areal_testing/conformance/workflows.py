"""What a workflow must do with prompts, generations and rewards."""

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

LONGEST = 24


class RewardFailedError(Exception):
    """A reward of the suite that fails on purpose."""


@dataclass
class Recorder:
    """A model and a reward for one episode, which remember what they were asked.

    Args:
        seed: of what the model writes.
        text: letters that it writes with.
        stop: the token that ends a turn.
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
        """Letters from the seed and the prompt, a log-probability and a version that no other token has.

        It takes the arguments that the runtime's own takes, and does not read the images.
        """
        draw = random.Random(f"{self.seed}-{list(input_ids)}")
        given = list(input_ids)
        self.limits.append(max_new_tokens)
        if self.delays:
            await asyncio.sleep(random.Random(f"{draw.getstate()}").random() / 100)
        most = LONGEST if max_new_tokens is None else min(LONGEST, max_new_tokens)
        count = draw.randint(2, 12)
        ids = [ord(draw.choice(self.text)) for _ in range(count)] + [self.stop]
        written = "".join(map(chr, ids))
        ids = ids[: min([len(ids), *(written.find(each) + len(each) for each in stop if each in written)])]
        reason = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        ids = ids[:most]
        logprobs = [-draw.random() - 0.01 for _ in ids]
        generation = Generation(ids, logprobs, [draw.randint(1, 9) for _ in ids], reason)
        self.generated.append((given, copy.deepcopy(generation)))
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
        """A number that follows from the completion; takes the arguments that the runtime's own takes."""
        texts = {"prompt": prompt, "completion": completion}
        for name, text in texts.items():
            assert isinstance(text, str), f"score was called with a {name} that is {type(text).__name__}, not text"
        assert isinstance(finish_reason, FinishReason), f"score was called with finish_reason={finish_reason!r}"
        assert list(completion_ids) in [generation.output_ids for _, generation in self.generated], (
            "score was called with completion_ids that no generation gave"
        )
        if prompt_ids is not None:
            assert list(prompt_ids) in [given for given, _ in self.generated], (
                "score was called with prompt_ids that no generation was asked with"
            )
        if self.fails:
            raise RewardFailedError
        value = random.Random(completion).random()
        return RewardScore(value, {"made": value})


class WorkflowSuite(ComponentSuite):
    """Set `component` (and `settings`) and `rows`, or override `make`.

    Attributes:
        rows: of the data set; every test plays each.
        letters: what the model of the tests writes with; add those that the workflow reacts to.
        scores: whether the workflow asks for the run's rewards; one whose environment gives them sets False.
        patience_s: a wait that takes longer has failed.
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
        """One token a character, with a plain chat template."""
        return TemplateTokenizer()

    def recorder(self, seed: int, **options: Any) -> Recorder:
        """The model and the reward of one episode."""
        return Recorder(seed, self.letters, self.make_tokenizer().eos_token_id, **options)

    async def play(self, workflow: Any, row: Mapping[str, Any], recorder: Recorder, index: int = 0) -> Episode:
        """One episode, checked for its form."""
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

    def test_every_sampled_token_is_there_as_it_was_sampled(self) -> None:
        """With its log-probability and version, behind exactly the tokens that the model was given."""
        workflow = self.make()
        for seed, row in enumerate(list(self.rows) * 5):
            recorder = self.recorder(seed, delays=False)
            episode = asyncio.run(self.play(workflow, row, recorder))
            assert recorder.generated, "the workflow generated nothing"
            found = 0
            for trajectory in episode.trajectories:
                found += _check_trajectory(trajectory, recorder.generated)
            assert found, "no trajectory holds a token that the policy sampled"

    def test_the_reward_is_a_finite_number(self) -> None:
        """And so are its components."""
        workflow = self.make()
        for seed, row in enumerate(self.rows):
            episode = asyncio.run(self.play(workflow, row, self.recorder(seed)))
            for name, value in {"reward": episode.reward, **episode.rewards}.items():
                assert isinstance(value, int | float), f"{name} is {value!r}"
                assert math.isfinite(value), f"{name} is {value!r}"

    def test_episodes_at_once_do_not_know_of_each_other(self) -> None:
        """One object plays all episodes, so it holds no state of an episode."""
        workflow = self.make()
        played = [(row, seed) for seed in range(6) for row in self.rows]

        async def together() -> list[Episode]:
            work = [self.play(workflow, row, self.recorder(seed), seed) for row, seed in played]
            return list(await asyncio.gather(*work))

        for (row, seed), found in zip(played, asyncio.run(together()), strict=True):
            alone = asyncio.run(self.play(self.make(), row, self.recorder(seed, delays=False), seed))
            assert found.reward == alone.reward, "an episode's reward depends on the episodes beside it"
            packed = [PackedBatch.from_trajectories(e.trajectories).to_bytes() for e in (found, alone)]
            assert packed[0] == packed[1], "an episode's tokens depend on the episodes beside it"

    def test_the_row_stays_as_it_was(self) -> None:
        """Siblings and later epochs get the same one."""
        workflow = self.make()
        for row in self.rows:
            given = copy.deepcopy(dict(row))
            asyncio.run(self.play(workflow, given, self.recorder(1)))
            assert given == row, "the workflow changed the row of the data set"

    def test_a_failing_reward_is_not_hidden(self) -> None:
        """The runtime decides what becomes of the group; a silent 0 would be learned from."""
        if not self.scores:
            pytest.skip("the workflow does not ask for the run's rewards")
        with pytest.raises(RewardFailedError):
            asyncio.run(self.play(self.make(), self.rows[0], self.recorder(1, fails=True)))

    def test_a_cancelled_episode_ends(self) -> None:
        """At once, without an answer."""

        async def check() -> None:
            recorder = self.recorder(1)
            reached = asyncio.Event()

            async def never(input_ids: list[int], **options: Any) -> Generation:
                reached.set()
                await asyncio.Event().wait()
                raise AssertionError("unreachable")

            recorder.generate = never  # type: ignore[method-assign]
            task = asyncio.ensure_future(self.play(self.make(), self.rows[0], recorder))
            asked = asyncio.ensure_future(reached.wait())
            await asyncio.wait({task, asked}, timeout=self.patience_s, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if task.done():
                task.result()  # what it raised before it asked for anything
            assert reached.is_set(), "the episode asked for no generation"
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=self.patience_s)
            assert done, "a cancelled episode went on"
            assert task.cancelled(), "a cancelled episode ended as if nothing had happened"

        asyncio.run(check())


def _check_trajectory(trajectory: Trajectory, generated: Sequence[tuple[list[int], Generation]]) -> int:
    """Every masked token belongs to a generation that continued exactly what stands before it; how many there are."""
    values = {key: value.tolist() for key, value in trajectory.tokens.items()}
    ids, mask = values["input_ids"], values["loss_mask"]
    place = 0
    while place < len(ids):
        if not mask[place]:
            assert values["logprobs"][place] == 0, "a token that was not sampled has a log-probability"
            assert values["versions"][place] == -1, "a token that was not sampled has a version"
            place += 1
            continue
        fitting = [g for prompt, g in generated if prompt == ids[:place] and _fits(g, values, place)]
        assert fitting, (
            f"the tokens from {place} on are marked as sampled, but no generation continued the {place} tokens before "
            "them with these ids, log-probabilities and versions: were they tokenized anew, or cut?"
        )
        place += len(fitting[0].output_ids)
    return sum(mask)


def _fits(generation: Generation, values: dict[str, list[Any]], place: int) -> bool:
    end = place + len(generation.output_ids)
    close = all(abs(a - b) < 1e-6 for a, b in zip(values["logprobs"][place:end], generation.logprobs, strict=False))
    same = values["input_ids"][place:end] == generation.output_ids and all(values["loss_mask"][place:end])
    return same and close and values["versions"][place:end] == generation.versions
