"""Anthropic's messages API: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, objects, positive, stop_texts, tools_of
from areal_core.chat import read_conversation
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event
    from areal_agents.requests import RefusedError


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
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"] or not turn.answer.calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in turn.answer.calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    reason = "tool_use" if turn.answer.calls else "end_turn"
    if turn.generation.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    return {
        "id": f"msg_{turn.identifier}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model", "")),
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": turn.prompt.length, "output_tokens": len(turn.generation.output_ids)},
    }


def stream(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> Iterator[Event]:
    """Yield the same response as stream events."""
    whole = write(body, turns, reader)
    used = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**used, "output_tokens": 0}}
    yield "message_start", {"type": "message_start", "message": begun}
    for number, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        start = {"type": "content_block_start", "index": number, "content_block": empty}
        yield "content_block_start", start
        yield "content_block_delta", {"type": "content_block_delta", "index": number, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": number}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": end, "usage": {"output_tokens": used["output_tokens"]}}
    yield "message_stop", {"type": "message_stop"}


def problem(error: RefusedError) -> dict[str, Any]:
    """Return the body of an error response."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
