"""Anthropic's messages API: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, objects, positive, stop_texts, tools_of
from areal_agents.streams import CONTENT, REASONING
from areal_core.chat import read_conversation
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Prompt, Turn
    from areal_agents.openai_chat import Event
    from areal_agents.requests import RefusedError
    from areal_agents.streams import AnswerStream


HONORED = frozenset({"max_tokens", "messages", "model", "stop_sequences", "stream", "system", "tool_choice", "tools"})
"""Request keys that the endpoint honors."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """Parse a request.

    Raises:
        RefusedError: a key has an invalid value, or the request needs a hosted tool.
        RowError: a message or a tool is invalid.
    """
    messages = read_conversation(objects(body, "messages"), "messages", sampled=True)
    if body.get("system"):
        messages = [*read_conversation([{"role": "system", "content": body["system"]}], "system"), *messages]
    return AgentRequest(
        messages=messages,
        tools=tools_of(body, "custom"),
        max_tokens=positive(body, "max_tokens"),
        stop=stop_texts(body.get("stop_sequences"), "stop_sequences"),
        # Anthropic's models continue a trailing assistant message; here it counts as a finished turn.
        not_honored=(*not_honored(body, HONORED), *(["prefill"] if messages[-1]["role"] == "assistant" else [])),
        model=str(body.get("model") or ""),
    )


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """Return the complete response."""
    del reader
    (turn,) = turns
    message = turn.answer.message
    blocks = [_block(REASONING, thought)] if (thought := message.get(REASONING)) else []
    if message[CONTENT] or not turn.answer.calls:
        blocks.append(_block(CONTENT, message[CONTENT]))
    for call in turn.answer.calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    reason = "tool_use" if turn.answer.calls else "end_turn"
    if turn.generation.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    return {
        **_begun(body, turn.identifier, turn.prompt),
        "content": blocks,
        "stop_reason": reason,
        "usage": {"input_tokens": turn.prompt.length, "output_tokens": len(turn.generation.output_ids)},
    }


def _begun(body: Mapping[str, Any], identifier: str, prompt: Prompt) -> dict[str, Any]:
    """Return the response before its first block."""
    return {
        "id": f"msg_{identifier}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model", "")),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt.length, "output_tokens": 0},
    }


def _block(field: str, text: str) -> dict[str, Any]:
    if field == REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


async def stream(body: Mapping[str, Any], answers: AnswerStream, reader: AnswerReader) -> AsyncIterator[Event]:
    """Yield the same response as stream events."""
    yield "message_start", {"type": "message_start", "message": _begun(body, answers.identifier, answers.prompt)}
    number, field = -1, ""
    async for piece in answers.pieces():
        if piece.field != field:
            if field:
                yield _stop(number)
            number, field = number + 1, piece.field
            yield _start(number, _block(field, ""))
        name = "thinking" if field == REASONING else "text"
        yield _delta(number, {"type": f"{name}_delta", name: piece.text})
    if field:
        yield _stop(number)
    whole = write(body, answers.turns, reader)
    for block in whole["content"]:
        if block["type"] != "tool_use" and field:  # without text there is an empty block, or calls alone
            continue
        number += 1
        if block["type"] == "tool_use":
            yield _start(number, {**block, "input": {}})
            arguments = json.dumps(block["input"], ensure_ascii=False)
            yield _delta(number, {"type": "input_json_delta", "partial_json": arguments})
        else:
            yield _start(number, block)
        yield _stop(number)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    written = {"output_tokens": whole["usage"]["output_tokens"]}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": written}
    yield "message_stop", {"type": "message_stop"}


def _start(number: int, block: dict[str, Any]) -> Event:
    return "content_block_start", {"type": "content_block_start", "index": number, "content_block": block}


def _delta(number: int, delta: dict[str, Any]) -> Event:
    return "content_block_delta", {"type": "content_block_delta", "index": number, "delta": delta}


def _stop(number: int) -> Event:
    return "content_block_stop", {"type": "content_block_stop", "index": number}


def problem(error: RefusedError) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
