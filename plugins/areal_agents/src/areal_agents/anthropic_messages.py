"""Anthropic's messages: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from areal_agents.requests import AgentRequest, RefusedError, call_of, objects, positive, stop_texts, text_of, tools_of
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event
    from areal_agents.requests import Message


def read(body: Mapping[str, Any]) -> AgentRequest:
    """A request; raises `RefusedError`."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    for number, message in enumerate(objects(body, "messages")):
        messages += _messages(message, f"messages[{number}]")
    tools, overridden = tools_of(body, _function, "custom")
    return AgentRequest(
        messages=messages,
        tools=tools,
        max_tokens=positive(body, "max_tokens"),
        stop=stop_texts(body.get("stop_sequences"), "stop_sequences"),
        other_sampling=overridden,
        model=str(body.get("model") or ""),
    )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or {"type": "object", "properties": {}}
    told = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool.get("name"), "parameters": schema, **told}


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """One message of blocks; results of tools are messages of their own, before what the user says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedError(f"{where}: the role {role!r:.40} is none of user, assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, where)}]
    found: Message = {"role": role, "content": ""}
    results: list[Message] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            found["content"] += str(block.get("text", ""))
        elif kind == "thinking":
            found["reasoning_content"] = found.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            call = call_of(block.get("id"), block.get("name"), block.get("input") or {})
            found.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            told = text_of(block.get("content"), where)
            results.append({"role": "tool", "content": told, "tool_call_id": str(block.get("tool_use_id", ""))})
        elif kind != "redacted_thinking":
            raise RefusedError(f"{where}: a block of type {kind!r:.40} is not served")
    has_more = found["content"] or found.get("tool_calls") or not results
    return [*results, *([found] if has_more else [])]


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """An answer as a whole."""
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
        "usage": {"input_tokens": len(turn.prompt.ids), "output_tokens": len(turn.generation.output_ids)},
    }


def stream(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> Iterator[Event]:
    """The same in pieces."""
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
    """A refusal."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
