"""What an agent asks for and what it is answered, whichever protocol it speaks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Message = dict[str, Any]
"""In the form of OpenAI's chat completions, which chat templates take: `role`, `content`, and where there are such
`tool_calls`, `tool_call_id`, `name`, `reasoning_content`. The arguments of calls are objects where they can be read."""


DEEPEST: Final = 100
"""Levels of objects and lists in what others write: templates go through them one within another."""
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


def tools_of(
    body: Mapping[str, Any], function_of: Callable[[dict[str, Any]], Any], kind: str = "function"
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The tools of a request, and what of its sampling is not the run's: nothing can force a call.

    Args:
        body: of the request.
        function_of: what a tool says of its function: `name`, `parameters`, and what else templates take.
        kind: type of such a tool.

    Raises:
        RefusedError: one is hosted, which nobody here runs, or its function cannot be read.
    """
    choice = body.get("tool_choice") or "auto"
    choice = choice.get("type") if isinstance(choice, dict) else choice
    forced = () if choice in ("auto", "none") else ("tool_choice",)
    tools = []
    for number, tool in enumerate(objects(body, "tools") if choice != "none" else ()):
        where, found, function = f"tools[{number}]", tool.get("type", kind), function_of(tool)
        if found != kind:
            message = f"a hosted tool of type {found!r:.40} is not served: only functions that the agent calls are"
            raise RefusedError(f"{where}: {message}")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RefusedError(f"{where}: the function has no name")
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {} if isinstance(schema, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
            raise RefusedError(f"{where}: the parameters of {function['name']:.80} are no JSON schema of an object")
        tools.append({"type": "function", "function": function})
    return tools, (*other_sampling(body), *forced)


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


def read_json(written: str) -> Any:
    """What others have written in JSON, and templates and messages can take.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or has half a character in it, which no UTF-8 can write.
    """
    try:
        found = json.loads(written)
        if "\\ud" in written.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found] if isinstance(found, dict | list) else []
    for _ in range(DEEPEST):
        nested = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for parts in nested for part in parts if isinstance(part, dict | list)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def arguments_of(written: Any) -> Any:
    """The arguments of a call as an object where they are one, else as they were written."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        found = read_json(written or "{}")
    except ValueError:
        return written
    return found if isinstance(found, dict) else written


def call_of(identifier: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call of a tool, in the form that templates take."""
    function = {"name": str(name), "arguments": arguments_of(arguments)}
    return {"id": str(identifier or ""), "type": "function", "function": function}


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
