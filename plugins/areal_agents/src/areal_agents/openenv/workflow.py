"""Play episodes in an environment of OpenEnv."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from areal_agents.environments.conversation import (
    Sessions,
    call_tools,
    converse,
    cut_result,
    mark_cut,
    opening_messages,
)
from areal_agents.episodes import make_episode
from areal_agents.foreign_process import EnvironmentServerError
from areal_agents.openenv.server import OpenEnvServer
from areal_agents.outcomes import Outcome
from areal_core.chat import template_arguments
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.conversations import Turn
    from areal_agents.openenv.config import OpenEnvSettings
    from areal_agents.openenv.server import OpenEnvSession, Step
    from areal_agents.session import Session
    from areal_core.chat import Message
    from areal_core.data import Episode
    from areal_core.sdk import WorkflowContext

TASK_KEYS = ("split", "index", "seed")
"""Keys of a row that select its task in an environment's reset."""


class OpenEnvWorkflow:
    """The policy acts in a session of an OpenEnv server, by its text or by calls of the environment's tools.

    Args:
        settings: the server, the format of actions and observations, and limits of a conversation.
    """

    def __init__(self, settings: OpenEnvSettings) -> None:
        self._settings = settings
        self._server = OpenEnvServer(settings)
        self._sessions = Sessions(settings, settings.max_steps)

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why an episode cannot be played for a row; empty if it can."""
        del tokenizer
        settings = self._settings
        needed = [*(settings.reset_keys or ()), *([settings.opening_key] if settings.opening_key else [])]
        if missing := [key for key in needed if key not in row]:
            return f"the row has no {', '.join(missing)}, only {', '.join(row)}: see reset_keys and opening_key"
        if settings.reset_keys is None and not any(key in row for key in TASK_KEYS):
            return (
                f"nothing in the row selects a task: it has none of {', '.join(TASK_KEYS)}, only {', '.join(row)}; "
                "set workflow.reset_keys, or use the data set agents/openenv"
            )
        return ""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Play one episode; see `RolloutWorkflow.run_episode`."""
        settings = self._settings
        began_at = time.monotonic()
        session = self._sessions.open(context)
        if settings.reset_keys is None:
            arguments = {key: row[key] for key in TASK_KEYS if key in row}
        else:
            arguments = {key: row[key] for key in settings.reset_keys}
        async with self._server.session(arguments) as (environment, first):
            play = _Play(settings, session, environment, first)
            await play.run(row)
        return await make_episode(session, play.outcome(), context, settings, time.monotonic() - began_at)

    async def close(self) -> None:
        """End the server."""
        await self._server.close()


class _Play:
    """One episode: the policy's session and the environment's.

    Args:
        settings: the workflow's.
        session: the policy's.
        environment: the environment's.
        step: the environment's first observation.
    """

    def __init__(self, settings: OpenEnvSettings, session: Session, environment: OpenEnvSession, step: Step) -> None:
        self._settings = settings
        self._session = session
        self._environment = environment
        self._step = step
        self._is_scored = step.reward is not None
        self._rewards: dict[str, float] = {}
        self._acting = asyncio.Lock()

    async def run(self, row: Mapping[str, Any]) -> None:
        """Let the policy act until the environment, the policy or a limit ends the episode."""
        settings = self._settings
        tools = await self._tools() if settings.acts_by == "tools" else []
        first = str(row[settings.opening_key]) if settings.opening_key else self._text()
        opening = opening_messages(settings.system, first)
        await converse(
            self._session, opening, tools, template_arguments(row, settings.chat_template_kwargs or {}), self._respond
        )

    def outcome(self) -> Outcome:
        """Return the rewards of the episode.

        Raises:
            EnvironmentServerError: the environment has ended the episode and never given a reward.
        """
        if self._settings.scored_by == "rewards":
            return Outcome()
        if self._step.is_done and not self._is_scored:
            raise EnvironmentServerError(
                "the environment ended the episode without a reward; set scored_by: rewards if it gives none"
            )
        return Outcome(sum(self._rewards.values()), turn_rewards=self._rewards)

    async def _respond(self, turn: Turn) -> list[Message]:
        reason = turn.generation.finish_reason
        if reason is FinishReason.ABORT:
            return []
        messages: list[Message]
        if self._settings.acts_by == "tools":
            if reason is FinishReason.LENGTH or not turn.answer.acts:
                return []
            messages = await call_tools(turn, lambda call: self._call(turn, call))
        else:
            text = str(turn.answer.message["content"])
            await self._act(turn, {**self._settings.action, self._settings.action_key: text})
            messages = [{"role": "user", "content": self._text()}]
        if self._step.is_done:
            return []
        if len(self._session.conversations.turns) == self._settings.max_steps:
            mark_cut(self._session)
            return []
        return messages

    async def _call(self, turn: Turn, call: Mapping[str, Any]) -> str:
        """Return the result of a tool. Calls after the end of the episode are not made."""
        function = call["function"]
        async with self._acting:  # in order: a session answers one message at a time
            if self._step.is_done:
                return "error: the episode has ended"
            action = {"type": "call_tool", "tool_name": function["name"], "arguments": function["arguments"]}
            await self._act(turn, action)
            observation = self._step.observation
        if error := observation.get("error"):
            self._session.counts["tool_errors"] += 1
            text = f"error: {error.get('message') if isinstance(error, dict) else error}"
        else:
            text = _tool_text(observation.get("result", observation))
        return cut_result(text, self._settings.longest_result)

    async def _act(self, turn: Turn, action: Mapping[str, Any]) -> None:
        self._step = await self._environment.ask("step", action)
        if self._step.reward is not None:
            self._is_scored = True
            self._rewards[turn.identifier] = self._rewards.get(turn.identifier, 0.0) + self._step.reward

    async def _tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the environment's tools.

        Raises:
            EnvironmentServerError: it lists none.
        """
        listed = (await self._environment.ask("step", {"type": "list_tools"})).observation.get("tools")
        try:
            schemas = [
                {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
                for tool in listed or ()
            ]
        except (KeyError, TypeError) as error:
            raise EnvironmentServerError(f"the environment lists tools that cannot be read: {error!r}") from error
        if not schemas:
            raise EnvironmentServerError("the environment lists no tools; set acts_by: text")
        return [{"type": "function", "function": schema} for schema in schemas]

    def _text(self) -> str:
        observation, key = self._step.observation, self._settings.observation_key
        if key is None:
            return json.dumps(observation, ensure_ascii=False)
        if key not in observation:
            raise EnvironmentServerError(
                f"an observation has no `{key}`, only {', '.join(observation)}: set observation_key"
            )
        return str(observation[key])


def _tool_text(result: Any) -> str:
    """Return the result of a tool as text. That of an MCP tool is its `data`, or the texts of its `content`."""
    if isinstance(result, dict) and "content" in result:
        if result.get("data") is None and isinstance(result["content"], list):
            return "\n".join(str(part.get("text", part)) for part in result["content"])
        result = result.get("data")
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
