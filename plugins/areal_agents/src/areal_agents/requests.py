"""What an agent asks for, whichever protocol it speaks."""

from __future__ import annotations

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
"""What requests for answers are counted as, by their path."""


class RefusedError(Exception):
    """A request that cannot be answered; the agent is told why.

    Args:
        message: what is wrong with it.
        status: of HTTP.
        code: short name of the reason, as OpenAI's errors have one.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request for an answer.

    Attributes:
        messages: the conversation so far.
        tools: function tools, as chat templates take them.
        template_arguments: further arguments of the chat template.
        count: answers that are wished for.
        max_tokens: of an answer; None leaves it to the run.
        stop: texts that end an answer.
        prompt_ids: the conversation as token ids, in place of messages.
        previous: identifier of the answer that the messages follow; empty where they are the whole conversation.
        opening: takes the place of the system message that the conversation of `previous` began with; empty keeps it.
        not_honored: names of options that the answer does not follow; see `areal_agents.options`.
        model: the name that was asked for: the part that the policy plays here.
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


def tools_of(body: Mapping[str, Any], kind: str = "function") -> list[dict[str, Any]]:
    """Return the tools of a request; none if the request rules out calls.

    Args:
        body: of the request.
        kind: the type that the protocol gives to a function of the agent's.

    Raises:
        RefusedError: a tool is hosted by the provider of a model, which a run is not.
        RowError: a function cannot be read.
    """
    choice = body.get("tool_choice")
    if "none" in (choice, choice.get("type") if isinstance(choice, dict) else None):
        return []
    tools = objects(body, "tools")
    for number, tool in enumerate(tools):
        if (found := tool.get("type", kind)) != kind:
            message = f"a hosted tool of type {found!r:.40} is not served: only functions that the agent calls are"
            raise RefusedError(f"tools[{number}]: {message}")
    return read_tools(tools)


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number from 1, or None where the request has none."""
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(f"{name} is {value!r:.40}; it must be a whole number from 1")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a list of objects; empty where the request has none."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{name} must be a list of objects")
    return value


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    """Return texts that end an answer."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"{name} must be a text or a list of texts")
    return tuple(texts)
