"""What an agent asks for and what it is answered, whichever protocol it speaks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Message = dict[str, Any]
"""In the form of OpenAI's chat completions, which chat templates take: `role`, `content`, and where there are such
`tool_calls`, `tool_call_id`, `name`, `reasoning_content`. The arguments of calls are objects where they can be read."""


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
        other_sampling: names of sampling settings in the request that are not the run's.
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
    other_sampling: tuple[str, ...] = ()
    model: str = ""


SAMPLING: tuple[str, ...] = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "response_format")
SAMPLING += ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Settings of a request that the run's own stand in place of."""


def other_sampling(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of those that a request sets."""
    return tuple(name for name in SAMPLING if body.get(name) not in (None, {}, {"type": "text"}))


def choose_tools(
    body: Mapping[str, Any], read_one: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The tools of a request, and what of its sampling is not the run's: nothing can force a call."""
    choice = body.get("tool_choice") or "auto"
    choice = choice.get("type") if isinstance(choice, dict) else choice
    forced = () if choice in ("auto", "none") else ("tool_choice",)
    tools = [] if choice == "none" else [read_one(tool) for tool in objects(body, "tools")]
    return tools, (*other_sampling(body), *forced)


def hosted(tool: Mapping[str, Any]) -> RefusedError:
    """Nobody here runs such a tool."""
    return RefusedError(
        f"tools: a hosted tool of type {tool.get('type')!r:.40} is not served: only functions that the agent calls are"
    )


def text_of(content: Any, where: str) -> str:
    """A content as one text; it may be a list of parts.

    Raises:
        RefusedError: a part is no text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError(f"{where}: content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise RefusedError(f"{where}: a part of type {kind!r} is not served, only text is")
        texts.append(text)
    return "".join(texts)


def arguments_of(written: Any) -> Any:
    """The arguments of a call as an object where they are one, else as they were written."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        found = json.loads(written or "{}")
    except ValueError:
        return written
    return found if isinstance(found, dict) else written


def positive(body: Mapping[str, Any], name: str) -> int | None:
    """A whole number from 1, or None where the request has none."""
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(f"{name} is {value!r:.40}; it must be a whole number from 1")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; empty where the request has none."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RefusedError(f"{name} must be a list of objects")
    return value


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    """Texts that end an answer."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"{name} must be a text or a list of texts")
    return tuple(texts)
