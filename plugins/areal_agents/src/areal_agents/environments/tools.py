"""The policy calls functions and tools of servers until it answers; what it calls wrongly comes back as an error."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, validate_call
from transformers.utils.chat_template_utils import get_json_schema

from areal_agents.answers import AnswerReader
from areal_agents.environments.tool_servers import BoundTool, OfferedTool, ToolError, ToolServerError, ToolServers
from areal_agents.episodes import make_episode
from areal_agents.outcomes import Outcome
from areal_agents.requests import AgentRequest, RefusedError
from areal_agents.session import Session
from areal_agents.threads import run_in_thread
from areal_core.chat import Conversation, prompt_of
from areal_core.data import FinishReason
from areal_core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_agents.environments.config import ToolSettings
    from areal_core.chat import Message
    from areal_core.data import Episode
    from areal_core.sdk import WorkflowContext


class ToolWorkflow:
    """A conversation with tools; the run's rewards score the last answer.

    Args:
        settings: which tools, and how long a conversation may be.
        tools: the functions; by default those that the settings name.
    """

    def __init__(self, settings: ToolSettings, tools: Sequence[Callable[..., Any]] = ()) -> None:
        self._settings = settings
        self._tools: list[OfferedTool] = []
        for tool in tools or [selection.build() for selection in settings.tools]:
            function, schema = read_tool(tool)
            self._tools.append((schema, function, "a function of workflow.tools"))
        name_tools(self._tools)
        self._servers = ToolServers(settings.mcp)
        self._reader: AnswerReader | None = None

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        async with self._servers.offered() as served:
            return await self._play(row, context, [*self._tools, *served])

    async def close(self) -> None:
        """End the servers."""
        await self._servers.close()

    async def _play(self, row: Mapping[str, Any], context: WorkflowContext, tools: list[OfferedTool]) -> Episode:
        settings, began = self._settings, time.monotonic()
        functions, schemas = name_tools(tools), [schema for schema, _, _ in tools]
        if self._reader is None:
            self._reader = AnswerReader(context.tokenizer, settings.tool_form, settings.chat_template)
        session = Session(context, self._reader, max_tokens=settings.max_tokens, most_answers=settings.max_turns)
        opening = prompt_of(row, settings.prompt)
        assert isinstance(opening, Conversation)
        messages = opening.messages
        for _ in range(settings.max_turns):
            request = AgentRequest(messages, schemas, opening.arguments)
            try:
                (turn,) = await session.answer(request, await session.place(request))
            except RefusedError as error:
                if error.code == "context_length_exceeded" and session.conversations.turns:
                    _cut(session)  # the conversation is full
                    break
                raise
            if not turn.answer.calls and not turn.answer.malformed:
                break
            if turn.generation.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT):
                break
            if len(session.conversations.turns) == settings.max_turns:
                _cut(session)  # nobody reads what they would bring
                break
            results = await asyncio.gather(*(self._call(call, functions, session) for call in turn.answer.calls))
            messages = [*turn.messages, *results]
            if turn.answer.malformed:
                message = "error: a call of a tool could not be read; write it as described"
                messages.append({"role": "user", "content": message})  # a tool's result would need the call's id
        return await make_episode(session, Outcome(), context, settings, time.monotonic() - began)

    async def _call(self, call: Mapping[str, Any], functions: Mapping[str, BoundTool], session: Session) -> Message:
        """The result of one call, or in words why there is none."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        told = {"role": "tool", "name": name, "tool_call_id": call["id"]}
        try:
            if name not in functions:
                raise ValueError(f"there is no tool {name!r:.60}; there are {', '.join(functions)}")
            async with asyncio.timeout(self._settings.tool_timeout_s):
                result = await functions[name](arguments)
            text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except ToolServerError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the policy is told
            session.counts["tool_errors"] += 1
            text = f"error: {_words(error, self._settings.tool_timeout_s)}"
        longest = self._settings.longest_result
        return {**told, "content": text if len(text) <= longest else text[:longest] + " ... (cut)"}


def _words(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"the tool took longer than {timeout_s:g} s"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"


def name_tools(tools: Sequence[OfferedTool]) -> dict[str, BoundTool]:
    """Tools by their names.

    Raises:
        RunError: two have one name.
    """
    found: dict[str, tuple[BoundTool, str]] = {}
    for schema, function, origin in tools:
        name = schema["function"]["name"]
        if name in found:
            raise RunError(
                f"two tools are called {name}: of {found[name][1]}, and of {origin}",
                hints=["rename one, or leave one of the two out of workflow.tools and workflow.mcp"],
            )
        found[name] = function, origin
    return {name: function for name, (function, _) in found.items()}


def read_tool(tool: Callable[..., Any]) -> tuple[BoundTool, dict[str, Any]]:
    """A tool that checks its arguments, and what a chat template is told of it.

    Args:
        tool: a typed function with a docstring, or a partial of one.

    Raises:
        ConfigError: it says too little of itself.
    """
    bound = tool.keywords if isinstance(tool, functools.partial) else {}
    function = tool.func if isinstance(tool, functools.partial) else tool
    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"the tool {getattr(function, '__name__', function)} cannot be described to the policy: {error}",
            hints=["annotate its parameters and write a docstring with a line for each"],
        ) from error
    parameters = schema["function"]["parameters"]
    parameters["properties"] = {k: v for k, v in parameters["properties"].items() if k not in bound}
    if "required" in parameters:
        parameters["required"] = [name for name in parameters["required"] if name not in bound]
    checked = validate_call(function)

    async def call(arguments: Mapping[str, Any]) -> Any:
        if taken := sorted(bound.keys() & arguments.keys()):
            raise TypeError(f"{', '.join(taken)} is not an argument of this tool")
        if inspect.iscoroutinefunction(function):
            return await checked(**arguments, **bound)
        return await run_in_thread(lambda: checked(**arguments, **bound))

    return call, schema


def _cut(session: Session) -> None:
    """The conversation ends by a limit, whatever ended its last answer."""
    session.conversations.turns[-1].generation.finish_reason = FinishReason.LENGTH
