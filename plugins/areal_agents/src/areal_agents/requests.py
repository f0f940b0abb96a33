"""Requests of agents, independent of the protocol."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_core.chat import Message, read_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REQUESTS: dict[str, str] = {
    "/v1/chat/completions": "chat_requests",
    "/v1/responses": "responses_requests",
    "/v1/messages": "messages_requests",
    "/inference/v1/generate": "generate_requests",
}
"""Names under which requests are counted, by path."""


class RefusedError(Exception):
    """The endpoint refuses a request. The agent gets the message as an error response.

    Args:
        message: what is wrong with the request.
        status: HTTP status.
        code: short name of the reason, for the `code` field of OpenAI's errors.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request for one or more answers.

    Attributes:
        messages: the conversation so far.
        tools: function tools, in the format of chat templates.
        template_arguments: further arguments of the chat template.
        count: number of answers to generate.
        max_tokens: maximum tokens of one answer; None: the run's limit.
        stop: texts that end an answer.
        prompt_ids: the conversation as token ids, instead of messages.
        previous: identifier of the answer that the messages continue; empty if they are the whole conversation.
        opening: system message that replaces the one of the `previous` conversation; empty: keep it.
        not_honored: names of options that the answer does not follow; see `areal_agents.options`.
        model: requested model name.
        session: identifier by which an environment tells its agents apart; empty if it does not.
        identifier: id of the response; with several answers, of the first of them.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    prompt_ids: Sequence[int] = ()
    previous: str = ""
    opening: Sequence[Message] = ()
    not_honored: tuple[str, ...] = ()
    model: str = ""
    session: str = ""
    identifier: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def agent_id(self) -> str:
        """Agent that sent the request."""
        return self.session or self.model


def tools_of(body: Mapping[str, Any], kind: str = "function") -> list[dict[str, Any]]:
    """Return the tools of a request, or none if the request rules out calls.

    Args:
        body: body of the request.
        kind: the protocol's type name for functions that the agent runs itself.

    Raises:
        RefusedError: a tool is hosted by a model provider, which the endpoint is not.
        RowError: a function's definition is invalid.
    """
    choice = body.get("tool_choice")
    if "none" in (choice, choice.get("type") if isinstance(choice, dict) else None):
        return []
    tools = objects(body, "tools")
    for number, tool in enumerate(tools):
        if (type_name := tool.get("type", kind)) != kind:
            message = f"a hosted tool of type {type_name!r:.40} is not served: use function tools"
            raise RefusedError(f"tools[{number}]: {message}")
    return read_tools(tools)


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """Return a positive integer of a request; None if the key is missing.

    Raises:
        RefusedError: the value is not an integer of at least 1.
    """
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(f"{name} is {value!r:.40}; it must be a whole number from 1")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects of a request; empty if the key is missing.

    Raises:
        RefusedError: the value is not a list of objects.
    """
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{name} must be a list of objects")
    return value


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts that end an answer.

    Raises:
        RefusedError: the value is not a non-empty text or a list of them.
    """
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"{name} must be a text or a list of texts")
    return tuple(texts)
