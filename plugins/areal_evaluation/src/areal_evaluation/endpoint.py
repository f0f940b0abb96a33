"""Episodes with somebody else's model: no model, tokenizer or inference engine is loaded.

Agents, data and rewards are those of the config. What is noted of an episode is what its recording heard.
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
from areal_evaluation.address import Address, look_for
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
    """Plays an episode; `score(text)` is the run's rewards on a text, `score(None)` on the last answer."""


@asynccontextmanager
async def open_endpoint(
    config: RunConfig, run: RunFolder, member: Member, **address: Any
) -> AsyncIterator[tuple[Evaluator, Callable[[Played], Mapping[str, Any]]]]:
    """An evaluator of the model behind an address, and what it notes of an episode."""
    section, rollout = config.evaluation, config.rollout
    assert section is not None
    where = replace(Address(**address), temperature=section.temperature)
    limits, connector = aiohttp.ClientTimeout(total=None, sock_connect=30.0), aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        client = aiohttp.ClientSession(timeout=limits, headers=where.headers, connector=connector)
        await stack.enter_async_context(client)
        with member.phase("looking for the endpoint"):
            await look_for(where, client)
        with member.phase("loading workflow, data and rewards"):
            play_at = await asyncio.to_thread(way_of_playing, config)
            rows = await asyncio.to_thread(section.dataset.build)
            rewards = await stack.enter_async_context(open_rewards(config, run, member.log))
        proxy = await stack.enter_async_context(RecordingProxy(where, client))
        watch_event_loop(rollout.blocked_timeout_s, member.log)
        player = EndpointPlayer(rows, play_at, rewards, proxy, rollout.max_retries)
        yield Evaluator(player.play_one, len(rows), section), lambda played: played.facts


def way_of_playing(config: RunConfig) -> PlayAt:
    """How an episode of the config's workflow is played with a model behind an address.

    Raises:
        ConfigError: it needs the tokens of an engine of areal's.
    """
    assert config.workflow is not None
    workflow = config.workflow.build()
    if hasattr(workflow, "play_at"):
        play_at: PlayAt = workflow.play_at
        return play_at
    if config.workflow.target == "core/single_turn":
        return _single_turn(config)
    raise ConfigError(
        f"the workflow {config.workflow.reference} deals in tokens, of which an address of others tells nothing",
        hints=["bring it as an agent, workflow: {type: agents/agent, agent: ...}; core/single_turn works as well"],
    )


def _single_turn(config: RunConfig) -> PlayAt:
    """`core/single_turn` is one request, whose answer the run's rewards score."""
    assert config.workflow is not None
    own: Any = config.workflow.settings
    settings = own.model_copy(update={"chat_template": "always"})
    asked = sampling_of(config)

    async def play_at(row: Mapping[str, Any], endpoint: Endpoint, score: Score, _: Players) -> RewardScore:
        conversation = prompt_of(row, settings)
        assert isinstance(conversation, Conversation)
        body = {"model": endpoint.model, "messages": list(conversation.messages), **asked}
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
    changed = {names.get(name, name): value for name, value in section
               if name not in left_out and value != getattr(neutral, name)}  # fmt: skip
    return {"max_completion_tokens": section.max_new_tokens, **changed}


class EndpointPlayer:
    """Plays the episodes of an evaluation against an address.

    Args:
        rows: held-out data.
        play_at: plays one episode.
        rewards: score an answer, as `open_rewards` yields them.
        proxy: records what is said.
        retries: further attempts at an episode that has failed.
    """

    def __init__(self, rows: Dataset, play_at: PlayAt, rewards: Rewards, proxy: RecordingProxy, retries: int) -> None:
        self._rows, self._play_at, self._rewards, self._proxy, self._retries = rows, play_at, rewards, proxy, retries

    async def play_one(self, row: int, sample: int, timeout_s: float) -> Played:
        """Play an episode, tried again where it failed, in so many seconds for all attempts together.

        Raises:
            RunError: the rewards cannot go on.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        facts: dict[str, Any] = {}
        for attempt in range(1, self._retries + 2):
            began = time.monotonic()
            with self._proxy.episode() as recording:
                try:
                    async with asyncio.timeout_at(deadline) as limit:
                        facts = await self._attempt(row, recording)
                except BaseException as error:  # an agent must not end the process either
                    task = asyncio.current_task()
                    if isinstance(error, RunError) or (task is not None and task.cancelling()):
                        raise
                    over = f"the episode took longer than rollout.episode_timeout_s: {timeout_s:g}"
                    message = "; ".join(filter(None, (over, recording.fault)))
                    facts = _told(message) if limit.expired() else _raised(error, recording.fault)
            facts["metrics"] = {**recording.metrics(), "episode_s": time.monotonic() - began, "attempts": attempt}
            facts["conversations"] = recording.transcript.conversations
            if "reward" in facts:
                return Played(row, sample, Episode([], facts["reward"], facts["rewards"]), facts=facts)
            if limit.expired():
                break
        return Played(row, sample, None, facts["cause"], facts)

    async def _attempt(self, number: int, recording: Recording) -> dict[str, Any]:
        row = await asyncio.to_thread(self._rows.__getitem__, number)

        async def score(answer: str | None) -> RewardScore:
            talk = recording.transcript.conversations
            prompt = "\n".join(message["text"] for message in (talk[-1] if talk else ()) if not message.get("sampled"))
            said = {"prompt": prompt, "completion": recording.last if answer is None else answer, "row": dict(row)}
            return await self._rewards({**said, "finish_reason": "length" if recording.is_truncated else "stop"})

        scored = await self._play_at(row, recording.endpoint, score, lambda: recording.agent_ids)
        if not recording.answers:
            return _told(recording.fault or "the agent has asked the model for nothing that it received")
        first = next((message["text"] for talk in recording.transcript.conversations for message in talk), "")
        return {
            "reward": scored.value,
            "rewards": dict(scored.components),
            "tokens": recording.tokens,
            "truncated": recording.is_truncated,
            "prompt": first,
            "completion": recording.last,
        }


def _told(words: str) -> dict[str, Any]:
    """What is noted of an episode that failed for something that these words say."""
    return {"error": words, "cause": words}


def _raised(error: BaseException, fault: str) -> dict[str, Any]:
    """The same of something that was raised; where the last request failed, that is the cause."""
    told = traceback_of(error)
    words = told.splitlines()[-1] if isinstance(error, BaseExceptionGroup) else " ".join(str(error).split())
    return {"error": told, "cause": fault or f"{type(error).__name__}: {words}"}
