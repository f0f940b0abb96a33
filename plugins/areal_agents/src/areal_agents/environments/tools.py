"""Workflow in which the policy calls Python functions and tools of MCP servers until it answers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, validate_call
from transformers.utils.chat_template_utils import get_json_schema

from areal_agents.environments.conversation import Sessions, call_tools, converse, cut_result, mark_cut
from areal_agents.environments.tool_servers import BoundTool, OfferedTool, ToolError, ToolServerError, ToolServers
from areal_agents.episodes import make_episode
from areal_agents.outcomes import Outcome
from areal_agents.threads import run_in_thread
from areal_core.chat import Conversation, prompt_of
from areal_core.data import FinishReason
from areal_core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_agents.conversations import Turn
    from areal_agents.environments.config import ToolSettings
    from areal_agents.session import Session
    from areal_core.chat import Message
    from areal_core.data import Episode
    from areal_core.sdk import WorkflowContext


class ToolWorkflow:
    """A conversation with tools. The run's rewards score the last answer.

    Args:
        settings: the tools, and limits of a conversation.
        tools: functions to use instead of those in the settings.

    Raises:
        ConfigError: a function lacks annotations or a docstring.
        RunError: two tools have the same name.
    """

    def __init__(self, settings: ToolSettings, tools: Sequence[Callable[..., Any]] = ()) -> None:
        self._settings = settings
        self._tools: list[OfferedTool] = []
        for tool in tools or [selection.build() for selection in settings.tools]:
            function, schema = read_tool(tool)
            self._tools.append((schema, function, "workflow.tools"))
        name_tools(self._tools)
        self._servers = ToolServers(settings.mcp)
        self._sessions = Sessions(settings, settings.max_turns)

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Play one conversation; see `RolloutWorkflow.run_episode`."""
        async with self._servers.offered() as served:
            return await self._play(row, context, [*self._tools, *served])

    async def close(self) -> None:
        """Close the MCP servers."""
        await self._servers.close()

    async def _play(self, row: Mapping[str, Any], context: WorkflowContext, tools: list[OfferedTool]) -> Episode:
        settings, began_at = self._settings, time.monotonic()
        functions = name_tools(tools)
        schemas = [schema for schema, _, _ in tools]
        session = self._sessions.open(context)
        opening = prompt_of(row, settings.prompt)
        assert isinstance(opening, Conversation)

        async def respond(turn: Turn) -> list[Message]:
            if turn.generation.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT) or not turn.answer.acts:
                return []
            if len(session.conversations.turns) == settings.max_turns:
                mark_cut(session)  # the policy has no turn left to use the results
                return []
            return await call_tools(turn, lambda call: self._call(call, functions, session))

        await converse(session, opening.messages, schemas, opening.arguments, respond)
        return await make_episode(session, Outcome(), context, settings, time.monotonic() - began_at)

    async def _call(self, call: Mapping[str, Any], functions: Mapping[str, BoundTool], session: Session) -> str:
        """Return the result of one call as text; a failed call returns its error to the policy."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if name not in functions:
                raise ValueError(f"there is no tool {name!r:.60}; there are {', '.join(functions)}")
            async with asyncio.timeout(self._settings.tool_timeout_s):
                result = await functions[name](arguments)
            text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except ToolServerError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise anything; the policy gets the message
            session.counts["tool_errors"] += 1
            text = f"error: {_describe_error(error, self._settings.tool_timeout_s)}"
        return cut_result(text, self._settings.longest_result)


def _describe_error(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"the tool took longer than {timeout_s:g} s"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"


def name_tools(tools: Sequence[OfferedTool]) -> dict[str, BoundTool]:
    """Return the tools by name.

    Raises:
        RunError: two tools have the same name.
    """
    named: dict[str, tuple[BoundTool, str]] = {}
    for schema, function, origin in tools:
        name = schema["function"]["name"]
        if name in named:
            raise RunError(
                f"two tools are called {name}: from {named[name][1]} and from {origin}",
                hints=["rename one, or leave one of the two out of workflow.tools and workflow.mcp"],
            )
        named[name] = function, origin
    return {name: function for name, (function, _) in named.items()}


def read_tool(tool: Callable[..., Any]) -> tuple[BoundTool, dict[str, Any]]:
    """Return a tool that checks its arguments, and its schema for the chat template.

    Args:
        tool: annotated function with a docstring, or a partial of one. Bound keywords are hidden from the policy.

    Raises:
        ConfigError: an annotation or the docstring is missing.
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
