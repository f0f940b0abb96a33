"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from areal_agents.requests import AgentRequest, RefusedError, call_of, objects, positive, stop_texts, text_of, tools_of
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.requests import Message

Event = tuple[str, dict[str, Any]]
"""Of a stream: its name, empty where the protocol has none, and its data."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ENDED = "[DONE]"
"""The last line of a stream."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """A request; raises `RefusedError`."""
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise RefusedError("chat_template_kwargs must be an object")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError("stream_options must be an object")
    tools, overridden = tools_of(body, lambda tool: tool.get("function"))
    return AgentRequest(
        messages=[read_message(message, f"messages[{n}]") for n, message in enumerate(objects(body, "messages"))],
        tools=tools,
        template_arguments=extra,
        count=positive(body, "n") or 1,
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=stop_texts(body.get("stop"), "stop"),
        other_sampling=overridden,
        model=str(body.get("model") or ""),
    )


def read_message(message: Mapping[str, Any], where: str) -> Message:
    """One message, in the form that templates take."""
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise RefusedError(f"{where}: the role {message.get('role')!r:.40} is none of {', '.join(ROLES)}")
    found: Message = {"role": role, "content": text_of(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            found[name] = message[name]
    if calls := objects(message, "tool_calls"):
        found["tool_calls"] = [_read_call(call, where) for call in calls]
    return found


def _read_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"{where}: a call of a tool needs a function with a name")
    return call_of(call.get("id"), function["name"], function.get("arguments"))


def finish_reason(turn: Turn) -> str:
    """Why an answer ended."""
    if turn.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if turn.answer.calls else "stop"


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """Tokens of a request."""
    prompt, written = len(turns[0].prompt.ids), sum(len(turn.generation.output_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """An answer as a whole."""
    choices = [
        {"index": n, "message": _written(t), "finish_reason": finish_reason(t), "logprobs": _logprobs(body, t, reader)}
        for n, t in enumerate(turns)
    ]
    return {**_head(body, turns, "chat.completion"), "choices": choices, "usage": usage(turns)}


def stream(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> Iterator[Event]:
    """The same in pieces."""
    head = _head(body, turns, "chat.completion.chunk")

    def chunk(number: int, delta: dict[str, Any], finish: str | None = None, logprobs: object = None) -> Event:
        choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return "", {**head, "choices": [choice]}

    for number, turn in enumerate(turns):
        message = _written(turn)
        calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", []))]
        yield chunk(number, message, logprobs=_logprobs(body, turn, reader))
        if calls:
            yield chunk(number, {"tool_calls": calls})
        yield chunk(number, {}, finish_reason(turn))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": usage(turns)}


def _logprobs(body: Mapping[str, Any], turn: Turn, reader: AnswerReader) -> dict[str, Any] | None:
    return {"content": reader.logprobs(turn.generation), "refusal": None} if body.get("logprobs") else None


def _head(body: Mapping[str, Any], turns: Sequence[Turn], kind: str) -> dict[str, Any]:
    identifier = f"chatcmpl-{turns[0].identifier}"
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": str(body.get("model", ""))}


def _written(turn: Turn) -> Message:
    message = {"refusal": None, **turn.answer.message}
    if turn.answer.calls:
        message["tool_calls"] = [written_call(call) for call in turn.answer.calls]
        message["content"] = message["content"] or None
    return message


def written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as a text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def problem(error: RefusedError) -> dict[str, Any]:
    """A refusal."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
