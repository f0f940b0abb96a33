"""Runs one episode: the workflow's context, retries, the deadline, seeds."""

from __future__ import annotations

import asyncio
import itertools
from base64 import b64encode
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any

from areal_core.data.sampler import sample_seed
from areal_core.data.tokens import TokenIds
from areal_core.errors import RunError, traceback_of, writable
from areal_core.interfaces.inference import GenerationRequest
from areal_core.interfaces.workflow import RewardScore, RowError, SkippedRowError, WorkflowContext
from areal_core.metric_names import prefix_of
from areal_core.rewards.scoring import RewardError
from areal_core.rollout.checks import EpisodeChecks
from areal_core.rollout.clocks import EpisodeClock, was_cancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.data.trajectory import Episode, FinishReason, Generation
    from areal_core.interfaces.inference import InferenceClient
    from areal_core.interfaces.workflow import RolloutWorkflow
    from areal_core.messages.workflows import RunGroup
    from areal_core.rewards.scoring import Scorer


class EpisodeError(Exception):
    """An episode failed in all its tries; the message is the traceback of the last one."""


class EpisodeRunner:
    """Runs episodes of one workflow against one engine.

    Args:
        workflow: shared by all episodes.
        engine: generates.
        scorer: computes the run's rewards.
        tokenizer: the model's.
        seed: the run's.
        vocabulary: number of token ids that the model has; None if it is not known.
        max_retries: retries after an exception. A failed reward is not retried, because it would fail again.
        failed_reward: reward of an answer whose rewards failed; None fails the episode.
        end_ids: tokens that end an answer.
        metric_prefix: put before the names of the workflow's metrics, with its slash; see `areal_core.metric_names`.
        on_failure: called after each failed try, with group, sample index, number of the try and traceback.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceClient,
        scorer: Scorer,
        tokenizer: Any,
        *,
        seed: int = 0,
        vocabulary: int | None = None,
        max_retries: int = 0,
        failed_reward: float | None = None,
        end_ids: frozenset[int] = frozenset(),
        metric_prefix: str = prefix_of(""),
        on_failure: Callable[[int, int, int, str], None] = lambda *_: None,
    ) -> None:
        self._workflow = workflow
        self._engine = engine
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_retries = max_retries
        self._failed_reward = failed_reward
        self._end_ids = end_ids
        self.on_failure = on_failure
        self.checks = EpisodeChecks(vocabulary, metric_prefix)
        self._failed_rewards = 0
        self._requests = itertools.count()
        self._conversations = itertools.count()

    def pop_metrics(self) -> dict[str, float]:
        """Return the counts of the rewards since the last call."""
        failed, self._failed_rewards = self._failed_rewards, 0
        return {**self._scorer.pop_metrics(), **({"failed": float(failed)} if failed else {})}

    async def run(self, row: Mapping[str, Any], task: RunGroup, sample_index: int) -> Episode:
        """Return an episode; a failed one is retried.

        Args:
            row: of the data set.
            task: the episode's group.
            sample_index: the episode's number in the group, from 0.

        Raises:
            EpisodeError: all tries failed, or together they took longer than `task.timeout_s`.
            RunError: the engine has died.
        """
        clock = EpisodeClock(task.timeout_s)
        try:
            return await clock.run(self._attempts(row, task, sample_index, clock))
        except TimeoutError:
            words = f"the episode took longer than rollout.episode_timeout_s: {task.timeout_s:g}"
        self.on_failure(task.number, sample_index, 0, words)
        raise EpisodeError(words)

    async def _attempts(
        self, row: Mapping[str, Any], task: RunGroup, sample_index: int, clock: EpisodeClock
    ) -> Episode:
        for attempt in range(self._max_retries + 1):
            place = task.number, sample_index, attempt
            context = self._context(row, task, sample_index, clock)
            try:  # in a task of its own: a workflow may cancel the task that it runs in
                return await asyncio.ensure_future(self._attempt(row, context, task.row, place))
            except EpisodeError as error:
                failure = error
                if isinstance(error.__cause__, (RewardError, RowError)):
                    break
            except asyncio.CancelledError:
                if was_cancelled():
                    raise
                failure = EpisodeError("the workflow cancelled its own task")
                self.on_failure(*place, str(failure))
        raise failure

    async def _attempt(
        self, row: Mapping[str, Any], context: WorkflowContext, number: int, place: tuple[int, int, int]
    ) -> Episode:
        try:
            return self.checks.check(await self._workflow.run_episode(row, context))
        except (RunError, asyncio.CancelledError):
            raise
        except BaseException as error:  # even SystemExit of a workflow must not end the process
            # The messages of these two name the fault; a traceback would only show where areal raised them.
            words = str(error) if isinstance(error, (RewardError, RowError)) else traceback_of(error)
            words = writable(words)
            named = f"data row {number} (counted from 0), sample {place[1]}: {words}"
            # Training replaces a skipped row. An evaluation always has the same rows, so it counts one as failed.
            if context.is_evaluation or not isinstance(error, SkippedRowError):
                self.on_failure(*place, named if isinstance(error, RowError) else words)
            raise EpisodeError(named) from error

    def _context(
        self, row: Mapping[str, Any], task: RunGroup, sample_index: int, clock: EpisodeClock
    ) -> WorkflowContext:
        turns, own, sampling = itertools.count(), str(next(self._conversations)), task.sampling

        async def generate(
            input_ids: Sequence[int],
            *,
            max_new_tokens: int | None = None,
            stop: Sequence[str] = (),
            images: Sequence[bytes] = (),
            on_tokens: Callable[[Sequence[int]], None] | None = None,
        ) -> Generation:
            settings = sampling
            prompt = TokenIds(input_ids)  # a copy: the workflow's conversation grows
            if max_new_tokens is not None and index(max_new_tokens) < 1:
                raise ValueError(f"generate is asked for max_new_tokens={max_new_tokens}; it must be at least 1")
            if max_new_tokens is not None and max_new_tokens < sampling.max_new_tokens:
                least = min(sampling.min_new_tokens, max_new_tokens)
                settings = replace(sampling, max_new_tokens=max_new_tokens, min_new_tokens=least)
            if images and not self._engine.capabilities.images:
                raise ValueError("the workflow has images, and the inference engine takes none: choose one that does")
            if stop:
                settings = replace(settings, stop=(*sampling.stop, *stop))
            with clock.request() as on_slot_change:
                generation = await self._engine.generate(
                    GenerationRequest(
                        request_id=str(next(self._requests)),
                        input_ids=prompt,
                        sampling=settings,
                        seed=sample_seed(self._seed, task.row, task.epoch, sample_index, next(turns)),
                        affinity=str(task.number),
                        conversation=own,
                        images=tuple(b64encode(image).decode() for image in images),
                        on_slot_change=on_slot_change,
                        on_tokens=on_tokens,
                    )
                )
            if (count := len(generation)) > (most := settings.max_new_tokens):
                raise ValueError(f"the inference engine answered with {count} tokens where {most} were asked for")
            return generation

        async def score(
            *,
            prompt: str,
            completion: str,
            completion_ids: list[int],
            finish_reason: FinishReason,
            prompt_ids: Sequence[int] | None = None,
        ) -> RewardScore:
            arguments = {
                "prompt": prompt,
                "completion": completion,
                "completion_ids": completion_ids,
                "finish_reason": finish_reason.name.lower(),
                "row": row,
            }
            if prompt_ids is not None:
                arguments["prompt_ids"] = list(prompt_ids)
            try:
                return await self._scorer.score(arguments)
            except RewardError as error:
                if self._failed_reward is None:
                    raise
                self._failed_rewards += 1
                self.on_failure(task.number, sample_index, 0, f"scored {self._failed_reward:g}: {error}")
                return RewardScore(self._failed_reward, {})

        return WorkflowContext(self._tokenizer, generate, score, task.is_evaluation, sample_index, self._end_ids)
