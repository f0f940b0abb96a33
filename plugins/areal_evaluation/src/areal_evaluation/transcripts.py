"""Transcripts of episodes, independent of the agent's protocol. The model's output is kept verbatim.

A message of a transcript has `role` and `text`. It may have `reasoning`, `calls` (names and arguments, as written), and
`sampled`, which is true if the evaluated model wrote the message in this episode.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Message = dict[str, Any]
ECHOES = ("reasoning", "function_call")
"""Item types of OpenAI's responses API that repeat the model's earlier output."""
MAX_PART_LENGTH = 2000
"""Characters of a part that is not text and is shown as JSON. For a longer one, such as an image, only its type is
shown."""


class Transcript:
    """The conversations of one episode. A request that extends an earlier one continues its conversation."""

    def __init__(self) -> None:
        self.conversations: list[list[Message]] = []
        self._requests: list[list[Any]] = []

    def add(self, request: Mapping[str, Any], answer: Sequence[Message]) -> None:
        """Add a request and the model's answer to it.

        Args:
            request: body of the request.
            answer: messages of the answer, see `answers_of`; or one message of the role "endpoint" if it failed.
        """
        messages = _messages_of(request)
        starts = (n for n, earlier in enumerate(self._requests) if messages[: len(earlier)] == earlier)
        number = next(starts, len(self._requests))
        if number == len(self._requests):
            self.conversations.append([])
            self._requests.append([])
        known = len(self._requests[number])
        self._requests[number] = messages
        new = dropwhile(_repeats, messages[known:]) if known else messages
        self.conversations[number] += [message for item in new for message in _read(item)]
        self.conversations[number] += answer


def answers_of(answer: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a complete answer in any protocol: one for each choice, or for each item."""
    messages: list[Any] = [choice.get("message") for choice in _objects(answer.get("choices"))]
    messages += _objects(answer.get("output"))
    if answer.get("type") == "message":
        messages.append({"role": "assistant", "content": answer.get("content")})
    return [{**message, "sampled": True} for item in messages for message in _read(item or {})]


def whole_answer(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a streamed answer in the form of a complete one. Fields that its events do not have are left out."""
    content, finish = "", None
    usage: dict[str, Any] = {}
    calls: dict[Any, dict[str, str]] = defaultdict(lambda: {"name": "", "arguments": ""})
    for event in events:
        match event:
            case {"type": "response.completed" | "response.incomplete", "response": dict(whole)}:
                return whole
            case {"type": "message_start", "message": {"usage": dict(counts)}} | {"usage": dict(counts)}:
                usage |= counts
        match event:
            case {"type": "content_block_start", "index": n, "content_block": {"type": "tool_use", "name": str(name)}}:
                calls[n]["name"] = name
            case {"type": "content_block_delta", "index": n, "delta": {"partial_json": str(piece)}}:
                calls[n]["arguments"] += piece
            case {"type": "content_block_delta", "delta": {"text": str(piece)}}:
                content += piece
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                finish = reason
        for choice in _objects(event.get("choices")):
            delta, finish = choice.get("delta") or {}, choice.get("finish_reason") or finish
            content += delta.get("content") or ""
            for call in _objects(delta.get("tool_calls")):
                for name in ("name", "arguments"):
                    calls[call.get("index")][name] += (call.get("function") or {}).get(name) or ""
    message = {"role": "assistant", "content": content, "tool_calls": [{"function": call} for call in calls.values()]}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def _messages_of(request: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a request in any protocol, the system message first."""
    system = request.get("instructions") or request.get("system")
    messages = request.get("messages") or request.get("input") or []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        messages = [messages]
    return [{"role": "system", "content": system}, *messages] if system else list(messages)


def _repeats(message: Any) -> bool:
    """Return whether a message repeats the model's earlier output."""
    return isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in ECHOES)


def _read(message: Any) -> Iterator[Message]:
    """Yield the transcript messages of a protocol's message. Anthropic's messages may hold several tool results."""
    result: Message = {"role": "?", "text": ""}
    thoughts, calls, has_results = [], [], False
    if isinstance(message, dict):
        result["role"] = message.get("role") or ("assistant" if message.get("type") in ECHOES else "tool")
    for part in _parts(message):
        match part:
            case {"type": "tool_result" | "function_call_output"}:
                yield {"role": "tool", "text": _text(part.get("content", part.get("output")))}
                has_results = True
            case {"type": "thinking"} | {"type": "reasoning"}:
                thoughts.append(_text(part.get("thinking") or part.get("summary") or part.get("content")))
            case {"type": "tool_use" | "function_call"} | {"function": dict()}:
                call = part.get("function") or part.get("custom") or part
                arguments = call.get("arguments", call.get("input"))
                calls.append({"name": _text(call.get("name")), "arguments": _text(arguments)})
            case _:
                result["text"] += _text(part)
    if any(thoughts):
        result["reasoning"] = "\n".join(filter(None, thoughts))
    if calls:
        result["calls"] = calls
    if len(result) > 2 or result["text"] or not has_results:
        yield result


def _parts(message: Any) -> list[Any]:
    """Return the texts, reasoning, calls and tool results of a message, in the form of Anthropic's content blocks."""
    if not isinstance(message, dict) or message.get("type") in (*ECHOES, "function_call_output"):
        return [message]
    content, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    parts = [{"type": "thinking", "thinking": thought}, *(content if isinstance(content, list) else [content])]
    return [*parts, message.get("refusal"), *({"function": {}, **c} for c in _objects(message.get("tool_calls")))]


def _text(content: Any) -> str:
    """Return a content as text; for an image and the like its JSON, or its type if that is too long."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(map(_text, content))
        case {"text": str(text)} | {"refusal": str(text)}:
            return text
    text = json.dumps(content, ensure_ascii=False)
    return f"[{content['type']}]" if len(text) > MAX_PART_LENGTH and "type" in content else text


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
