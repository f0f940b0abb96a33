"""Run episodes against a model behind an endpoint. No model, tokenizer or inference engine is loaded.

Agents, data and rewards are those of the config. The results come from the recording of each episode's requests.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp

from areal_core.chat import Conversation, prompt_of
from areal_core.data import Episode
from areal_core.errors import ConfigError, RunError, traceback_of
from areal_core.processes import watch_event_loop
from areal_core.programs import Evaluator, Played, open_rewards
from areal_evaluation.address import Address, check_endpoint
from areal_evaluation.recording import RecordingProxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping

    from areal_core.config import RunConfig
    from areal_core.processes import Member
    from areal_core.programs import RunFolder
    from areal_core.sdk import Dataset, Endpoint, RewardScore
    from areal_evaluation.recording import Recording

    Rewards = Callable[[Mapping[str, Any]], Awaitable[RewardScore]]
    Score = Callable[[str | None], Awaitable[RewardScore]]
    Players = Callable[[], Collection[str]]
    PlayAt = Callable[[Mapping[str, Any], Endpoint, Score, Players], Awaitable[RewardScore]]
    """Runs an episode. `score(text)` scores a text with the run's rewards; `score(None)` scores the last answer."""


@asynccontextmanager
async def open_endpoint(
    config: RunConfig, run: RunFolder, member: Member, **address: Any
) -> AsyncIterator[tuple[Evaluator, Callable[[Played], Mapping[str, Any]]]]:
    """Open an evaluator of the model at an address, and a function that returns the results of an episode.

    Args:
        config: config of the evaluation.
        run: folder of the evaluation.
        member: this process; it shows the phase and writes the log.
        address: fields of `Address`.

    Raises:
        ConfigError: the workflow does not work with an endpoint, or the key's variable is not set.
        RunError: the endpoint does not answer, or refuses the key.
    """
    section, rollout = config.evaluation, config.rollout
    assert section is not None
    target = replace(Address(**address), temperature=section.temperature)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        client = aiohttp.ClientSession(timeout=timeout, headers=target.headers, connector=connector)
        await stack.enter_async_context(client)
        with member.phase("checking the endpoint"):
            await check_endpoint(target, client)
        with member.phase("loading workflow, data and rewards"):
            play_at = await asyncio.to_thread(episode_player, config)
            rows = await asyncio.to_thread(section.dataset.build)
            rewards = await stack.enter_async_context(open_rewards(config, run, member.log))
        proxy = await stack.enter_async_context(RecordingProxy(target, client))
        watch_event_loop(rollout.blocked_timeout_s, member.log)
        player = EndpointPlayer(rows, play_at, rewards, proxy, rollout.max_retries)
        yield Evaluator(player.play_one, len(rows), section), lambda played: played.facts


def episode_player(config: RunConfig) -> PlayAt:
    """Return the function that runs an episode of the config's workflow against an endpoint.

    Raises:
        ConfigError: the workflow needs tokens, which an endpoint does not return.
    """
    assert config.workflow is not None
    workflow = config.workflow.build()
    if hasattr(workflow, "play_at"):
        play_at: PlayAt = workflow.play_at
        return play_at
    if config.workflow.target == "core/single_turn":
        return _single_turn(config)
    raise ConfigError(
        f"the workflow {config.workflow.reference} needs tokens, which --endpoint does not return",
        hints=["write it as an agent, workflow: {type: agents/agent, agent: ...}; core/single_turn works as well"],
    )


def _single_turn(config: RunConfig) -> PlayAt:
    """Return the function that runs `core/single_turn` as one request, whose answer the run's rewards score."""
    assert config.workflow is not None
    workflow_settings: Any = config.workflow.settings
    settings = workflow_settings.model_copy(update={"chat_template": "always"})
    sampling = sampling_of(config)

    async def play_at(row: Mapping[str, Any], endpoint: Endpoint, score: Score, _: Players) -> RewardScore:
        conversation = prompt_of(row, settings)
        assert isinstance(conversation, Conversation)
        body = {"model": endpoint.model, "messages": list(conversation.messages), **sampling}
        if conversation.tools:
            body["tools"] = list(conversation.tools)
        if conversation.arguments:
            body["chat_template_kwargs"] = dict(conversation.arguments)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=None) as answer,
        ):
            if answer.status != 200:
                raise ConnectionError(f"HTTP {answer.status} {answer.reason}: {await answer.text()}")
        return await score(None)

    return play_at


def sampling_of(config: RunConfig) -> dict[str, Any]:
    """Return the run's sampling as options of a chat completion.

    Settings with neutral values are left out, because hosted models refuse options that they do not know.
    """
    section = config.sampling
    names = {"min_new_tokens": "min_tokens"}  # vLLM's and SGLang's names; the others are the same
    left_out = {"max_new_tokens", "allow_mismatched_sampling"}
    neutral = type(section)()
    changed = {
        names.get(name, name): value
        for name, value in section
        if name not in left_out and value != getattr(neutral, name)
    }
    return {"max_completion_tokens": section.max_new_tokens, **changed}


class EndpointPlayer:
    """Runs the episodes of an evaluation against an endpoint.

    Args:
        rows: held-out data.
        play_at: runs one episode.
        rewards: scores an answer, as `open_rewards` yields it.
        proxy: records requests and answers.
        retries: number of retries of a failed episode.
    """

    def __init__(self, rows: Dataset, play_at: PlayAt, rewards: Rewards, proxy: RecordingProxy, retries: int) -> None:
        self._rows = rows
        self._play_at = play_at
        self._rewards = rewards
        self._proxy = proxy
        self._retries = retries

    async def play_one(self, row: int, sample: int, timeout_s: float) -> Played:
        """Run an episode and retry it if it fails.

        Args:
            row: index of the row.
            sample: index of the sample of this row.
            timeout_s: timeout in seconds for all attempts together.

        Raises:
            RunError: the rewards failed for good.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        facts: dict[str, Any] = {}
        for attempt in range(1, self._retries + 2):
            began_at = time.monotonic()
            with self._proxy.episode() as recording:
                try:
                    async with asyncio.timeout_at(deadline) as limit:
                        facts = await self._attempt(row, recording)
                except BaseException as error:  # an agent may raise even SystemExit; it must not end this process
                    task = asyncio.current_task()
                    if isinstance(error, RunError) or (task is not None and task.cancelling()):
                        raise
                    timed_out = f"the episode took longer than rollout.episode_timeout_s: {timeout_s:g}"
                    message = "; ".join(filter(None, (timed_out, recording.fault)))
                    facts = _failure(message) if limit.expired() else _failure_of(error, recording.fault)
            facts["metrics"] = {**recording.metrics(), "episode_s": time.monotonic() - began_at, "attempts": attempt}
            facts["conversations"] = recording.transcript.conversations
            if "reward" in facts:
                return Played(row, sample, Episode([], facts["reward"], facts["rewards"]), facts=facts)
            if limit.expired():
                break
        return Played(row, sample, None, facts["cause"], facts)

    async def _attempt(self, number: int, recording: Recording) -> dict[str, Any]:
        row = await asyncio.to_thread(self._rows.__getitem__, number)

        async def score(answer: str | None) -> RewardScore:
            conversations = recording.transcript.conversations
            last = conversations[-1] if conversations else []
            return await self._rewards(
                {
                    "prompt": "\n".join(message["text"] for message in last if not message.get("sampled")),
                    "completion": recording.last if answer is None else answer,
                    "row": dict(row),
                    "finish_reason": "length" if recording.is_truncated else "stop",
                }
            )

        scored = await self._play_at(row, recording.endpoint, score, lambda: recording.agent_ids)
        if not recording.answers:
            return _failure(recording.fault or "the agent received no answer from the model")
        messages = (message for conversation in recording.transcript.conversations for message in conversation)
        return {
            "reward": scored.value,
            "rewards": dict(scored.components),
            "tokens": recording.tokens,
            "truncated": recording.is_truncated,
            "prompt": next((message["text"] for message in messages), ""),
            "completion": recording.last,
        }


def _failure(message: str) -> dict[str, Any]:
    """Return the result of an episode that failed without an exception."""
    return {"error": message, "cause": message}


def _failure_of(error: BaseException, fault: str) -> dict[str, Any]:
    """Return the result of an episode that raised an error. If the last request failed, its fault is the cause."""
    text = traceback_of(error)
    summary = text.splitlines()[-1] if isinstance(error, BaseExceptionGroup) else " ".join(str(error).split())
    return {"error": text, "cause": fault or f"{type(error).__name__}: {summary}"}
