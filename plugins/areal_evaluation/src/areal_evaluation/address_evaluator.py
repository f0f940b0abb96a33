"""The process that evaluates somebody else's model.

Agents, data and rewards are those of the config. No model, tokenizer or inference engine is loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from areal_core.background import watch_event_loop
from areal_core.config import load_run
from areal_core.driver import ASKED_TO_STOP
from areal_core.errors import ConfigError, RunError, traceback_of
from areal_core.rewards.pool import RewardPool
from areal_core.runs import run_event_loop
from areal_core.workflows.prompts import prompt_messages
from areal_core.workflows.single_turn import SingleTurn
from areal_evaluation.address import Address, look_for
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected
from areal_evaluation.recording import Recording, RecordingProxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from areal_core.config import RunConfig
    from areal_core.interfaces import Endpoint, RewardScore
    from areal_core.runs import Member, RunFolder

    Score = Callable[[str | None], Awaitable[RewardScore]]
    Players = Callable[[], Collection[str]]
    Play = Callable[[Mapping[str, Any], Endpoint, Score, Players], Awaitable[RewardScore]]


def play(run: RunFolder, address: Address, concurrency: int, member: Member) -> int:
    """Play all episodes, or those that end before somebody interrupts; so many at a time, 0 for as many as in a run."""
    try:
        run_event_loop(_play(run, address, concurrency, member))
    except asyncio.CancelledError:
        return ASKED_TO_STOP
    return 0


async def _play(run: RunFolder, address: Address, concurrency: int, member: Member) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    member.on_stop = lambda: loop.call_soon_threadsafe(task.cancel)
    config = load_run(run.path).config
    limits = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, headers=address.headers, connector=connector) as client:
        with member.phase("looking for the endpoint"):
            await look_for(address, client)
        with member.phase("loading workflow, data and rewards"):
            way, rows = await asyncio.to_thread(_load, config)
            scorer = await _scorer(run, config, member)
        proxy = RecordingProxy(address, client)
        try:
            await proxy.start()
            watch_event_loop(config.rollout.blocked_timeout_s, member.log)
            member.enter("evaluating")
            evaluator = AddressEvaluator(config, rows, way, scorer, proxy, member.notify)
            await evaluator.play(concurrency or config.rollout.episodes_at_once)
        finally:
            await proxy.close()
            if scorer is not None:
                await scorer.close()


def _load(config: RunConfig) -> tuple[Play, Any]:
    assert config.evaluation is not None
    return way_of_playing(config), config.evaluation.dataset.build()


async def _scorer(run: RunFolder, config: RunConfig, member: Member) -> RewardPool | None:
    if not config.rewards:
        return None
    rollout = config.rollout
    pool = RewardPool(
        run.path,
        count=rollout.reward_processes,
        timeout_s=rollout.reward_timeout_s,
        start_timeout_s=config.training.phase_timeout_s,
        log=member.log,
    )
    try:
        await pool.start()
    except BaseException:
        await pool.close()
        raise
    return pool


def way_of_playing(config: RunConfig) -> Play:
    """How an episode of the config's workflow is played with a model behind an address.

    Raises:
        ConfigError: it needs the tokens of an engine of areal's.
    """
    assert config.workflow is not None
    workflow = config.workflow.build()
    if hasattr(workflow, "play_at"):
        way: Play = workflow.play_at
        return way
    if type(workflow) is SingleTurn:
        return SingleAnswer(config)
    raise ConfigError(
        f"the workflow {config.workflow.reference} deals in tokens, of which an address of others tells nothing",
        hints=["bring it as an agent, workflow: {type: agents/agent, agent: ...}; core/single_turn works as well"],
    )


class SingleAnswer:
    """Plays `core/single_turn`: one request, whose answer the run's rewards score.

    Args:
        config: settings of the workflow and of sampling.
    """

    def __init__(self, config: RunConfig) -> None:
        assert config.workflow is not None
        settings: Any = config.workflow.settings
        self._settings = settings.model_copy(update={"chat_template": "always"})
        self._sampling: dict[str, float] = {"max_completion_tokens": config.sampling.max_new_tokens}
        if config.sampling.temperature != 1:
            self._sampling["temperature"] = config.sampling.temperature

    async def __call__(self, row: Mapping[str, Any], endpoint: Endpoint, score: Score, players: Players) -> RewardScore:
        """Play one episode."""
        del players  # there is one
        body = {"model": endpoint.model, "messages": prompt_messages(row, self._settings), **self._sampling}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=None) as answer,
        ):
            if answer.status != 200:
                raise ConnectionError(await answer.text())
        return await score(None)


@dataclass
class _Failed(Exception):  # noqa: N818 - carries what is noted of an episode
    """An attempt at an episode did not end well."""

    cause: str
    error: str


class AddressEvaluator:
    """Plays all episodes of an evaluation against an address.

    Args:
        config: of the run.
        rows: held-out data.
        way: plays one episode.
        scorer: the run's rewards; None where it has none.
        proxy: records what is said.
        post: takes messages for the driver.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: Any,
        way: Play,
        scorer: RewardPool | None,
        proxy: RecordingProxy,
        post: Callable[[Any], object],
    ) -> None:
        assert config.evaluation is not None
        self._rollout, self._section = config.rollout, config.evaluation
        self._rows, self._way, self._scorer, self._proxy, self._post = rows, way, scorer, proxy, post
        self._began = time.monotonic()

    async def play(self, concurrency: int) -> None:
        """Play them, so many at a time.

        Raises:
            RunError: the first `rollout.max_consecutive_failures` episodes all failed.
        """
        count, samples = min(len(self._rows), self._section.limit or sys.maxsize), self._section.samples_per_prompt
        places = itertools.product(range(count), range(samples))
        self._post(EpisodesExpected(count * samples))
        self._began = time.monotonic()
        ended = failed = 0

        async def work() -> None:
            nonlocal ended, failed
            for row, sample in places:
                line = await self._episode(row, sample)
                self._post(EpisodePlayed({**line, "seconds": time.monotonic() - self._began}))
                ended, failed = ended + 1, failed + ("error" in line)
                if failed == ended == self._rollout.max_consecutive_failures:
                    message = f"the first {failed} episodes all failed: rollout.max_consecutive_failures"
                    raise RunError(f"{message}; the last:\n{line['cause']}")

        workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, count * samples))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _episode(self, row: int, sample: int) -> dict[str, Any]:
        """What is noted of an episode; it is tried again as those of a run are."""
        line: dict[str, Any] = {"row": row, "sample": sample}
        for attempt in range(self._rollout.max_retries + 1):
            began, recording = time.monotonic(), self._proxy.open()
            try:
                line |= await self._attempt(row, recording)
                break
            except _Failed as failed:
                if attempt == self._rollout.max_retries or isinstance(failed.__cause__, TimeoutError):
                    line |= {"error": failed.error, "cause": failed.cause}
                    break
            finally:
                self._proxy.end(recording)
        noted = recording.facts()
        noted["metrics"] |= {"episode_s": time.monotonic() - began, "attempts": attempt + 1}
        return {**line, **noted}

    async def _attempt(self, number: int, recording: Recording) -> dict[str, Any]:
        limit = self._rollout.episode_timeout_s
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(limit) as deadline:
                row = await asyncio.to_thread(self._rows.__getitem__, number)
                score = await self._way(
                    row,
                    recording.endpoint,
                    lambda answer: self._score(row, recording, answer),
                    lambda: recording.players,
                )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                said = f"; {recording.fault}" if recording.fault else ""
                told = f"the episode took longer than rollout.episode_timeout_s: {limit:g}{said}"
                raise _Failed(told, told) from error
            if isinstance(error, RunError):  # the rewards cannot go on
                raise
            told = traceback_of(error).encode("utf-8", "backslashreplace").decode()
            words = told.splitlines()[-1] if isinstance(error, BaseExceptionGroup) else " ".join(str(error).split())
            raise _Failed(recording.fault or f"{type(error).__name__}: {words}", told) from error
        if not recording.answers:
            told = recording.fault or "the agent has asked the model for nothing that it received"
            raise _Failed(told, told)
        first = next((message["text"] for talk in recording.transcript.conversations for message in talk), "")
        return {
            "reward": score.value,
            "rewards": dict(score.components),
            "tokens": recording.tokens,
            "truncated": recording.is_truncated,
            "prompt": first,
            "completion": recording.last,
        }

    async def _score(self, row: Mapping[str, Any], recording: Recording, answer: str | None) -> RewardScore:
        if self._scorer is None:
            raise ConfigError("the agent returned no reward, and the config has no rewards", hints=["set rewards"])
        talk = recording.transcript.conversations
        prompt = "\n".join(message["text"] for message in (talk[-1] if talk else ()) if not message.get("sampled"))
        completion = recording.last if answer is None else answer
        reason = "length" if recording.is_truncated else "stop"
        return await self._scorer.score(
            {"prompt": prompt, "completion": completion, "finish_reason": reason, "row": dict(row)}
        )
