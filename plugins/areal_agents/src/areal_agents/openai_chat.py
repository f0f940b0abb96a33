"""OpenAI's chat completions API: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, RefusedError, objects, positive, stop_texts, tools_of
from areal_core.chat import read_conversation, template_arguments
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.streams import AnswerStream
    from areal_core.chat import Message

Event = tuple[str, dict[str, Any]]
"""Event of a stream: its name, empty if the protocol has none, and its data."""
HONORED = frozenset(
    {
        "chat_template_kwargs",
        "documents",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "return_token_ids",
        "stop",
        "stream",
        "tool_choice",
        "tools",
    }
)
"""Request keys that the endpoint honors."""
ENDED = "[DONE]"
"""Data of the last event of a stream."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """Parse a request.

    Raises:
        RefusedError: a key has an invalid value, or the request needs a hosted tool.
        RowError: a message, a tool or a template argument is invalid.
    """
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError("stream_options must be an object")
    return AgentRequest(
        messages=read_conversation(objects(body, "messages"), "messages", sampled=True),
        tools=tools_of(body),
        template_arguments=template_arguments(body, {}),
        count=positive(body, "n") or 1,
        max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
        stop=stop_texts(body.get("stop"), "stop"),
        not_honored=not_honored(body, HONORED),
        model=str(body.get("model") or ""),
    )


def finish_reason(turn: Turn) -> str:
    """Return the reason why an answer ended: "length", "tool_calls" or "stop"."""
    if turn.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if turn.answer.calls else "stop"


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """Return the token counts of a request with all its answers."""
    prompt, written = turns[0].prompt.length, sum(len(turn.generation.output_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """Return the complete response."""
    choices = [
        {
            "index": number,
            "message": _message_of(turn),
            "finish_reason": finish_reason(turn),
            "logprobs": _logprobs(body, turn, reader),
            **({"token_ids": turn.generation.output_ids} if body.get("return_token_ids") else {}),
        }
        for number, turn in enumerate(turns)
    ]
    head = _head(body, turns[0].identifier, "chat.completion")
    return {**head, "choices": choices, "usage": usage(turns), **_prompt(body, turns[0].prompt)}


async def stream(body: Mapping[str, Any], answers: AnswerStream, reader: AnswerReader) -> AsyncIterator[Event]:
    """Yield the same response as stream events. Token ids and log-probabilities are in the last event of an answer."""
    head = _head(body, answers.identifier, "chat.completion.chunk")

    def chunk(number: int, delta: dict[str, Any], finish: str | None = None, **fields: Any) -> Event:
        choice = {"index": number, "delta": delta, "finish_reason": finish, "logprobs": None, **fields}
        return "", {**head, "choices": [choice]}

    for number in range(answers.count):
        name, data = chunk(number, {"role": "assistant", "content": "", "refusal": None})
        yield name, {**data, **(_prompt(body, answers.prompt) if not number else {})}
    async for piece in answers.pieces():
        yield chunk(piece.choice, {piece.field: piece.text})
    for number, turn in enumerate(answers.turns):
        if turn.answer.calls:
            calls = [{"index": index, **written_call(call)} for index, call in enumerate(turn.answer.calls)]
            yield chunk(number, {"tool_calls": calls})
        ids: dict[str, Any] = {"token_ids": turn.generation.output_ids} if body.get("return_token_ids") else {}
        yield chunk(number, {}, finish_reason(turn), logprobs=_logprobs(body, turn, reader), **ids)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": usage(answers.turns)}


def _logprobs(body: Mapping[str, Any], turn: Turn, reader: AnswerReader) -> dict[str, Any] | None:
    return {"content": reader.logprobs(turn.generation), "refusal": None} if body.get("logprobs") else None


def _prompt(body: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Return the prompt's token ids under vLLM's name, if the request asks for them."""
    return {"prompt_token_ids": prompt.ids} if body.get("return_token_ids") else {}


def _head(body: Mapping[str, Any], identifier: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{identifier}",
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model", "")),
    }


def _message_of(turn: Turn) -> Message:
    message = {"refusal": None, **turn.answer.message}
    if turn.answer.calls:
        message["tool_calls"] = [written_call(call) for call in turn.answer.calls]
        message["content"] = message["content"] or None
    return message


def written_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments encoded as a JSON string."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def problem(error: RefusedError) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
