"""What was said in an episode, message by message, whichever protocol an agent speaks; the model's words verbatim.

A message of a transcript has `role` and `text`; where there are such, `reasoning` and `calls` (name and arguments as
they were written); and `sampled`, true where the model under evaluation said it in this episode.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Message = dict[str, Any]
ECHOES = ("reasoning", "function_call")
"""Items of OpenAI's responses that repeat what the model said."""


class Transcript:
    """The conversations of one episode. A request that repeats an earlier one and goes on continues it."""

    def __init__(self) -> None:
        self.conversations: list[list[Message]] = []
        self._asked: list[list[Any]] = []

    def add(self, asked: Mapping[str, Any], said: Sequence[Message]) -> None:
        """A request, and what the model answered to it.

        Args:
            asked: the request's body.
            said: messages of the answer, see `answers_of`; empty where it failed.
        """
        messages = _messages_of(asked)
        number = next((n for n, known in enumerate(self._asked) if messages[: len(known)] == known), None)
        if number is None:
            self.conversations.append([])
            self._asked.append([])
            number = len(self._asked) - 1
        new = messages[len(self._asked[number]) :]
        while self._asked[number] and new and _repeats(new[0]):
            new = new[1:]
        self.conversations[number] += [*(message for one in new for message in _read(one)), *said]
        self._asked[number] = messages


def answers_of(answer: Mapping[str, Any]) -> list[Message]:
    """The messages of a whole answer in any of the protocols: one for each choice, or for each item."""
    said: list[Any] = [choice.get("message") or {} for choice in _objects(answer.get("choices"))]
    said += _objects(answer.get("output"))
    if answer.get("type") == "message":
        said.append({"role": "assistant", "content": answer.get("content")})
    return [{**message, "sampled": True} for one in said for message in _read(one)]


def whole_answer(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer in pieces as it would have come whole; what is not told in pieces is not in it."""
    content, finish = "", None
    calls: dict[Any, dict[str, str]] = {}
    answer: dict[str, Any] = {}
    for event in events:
        if isinstance(event.get("usage"), dict):
            answer["usage"] = {**answer.get("usage", {}), **event["usage"]}
        if event.get("type") in ("response.completed", "response.incomplete"):
            return dict(event.get("response") or {})
        if event.get("type") == "message_start":
            answer |= {"type": "message", **event.get("message", {})}
        for choice in _objects(event.get("choices")):
            delta, finish = choice.get("delta") or {}, choice.get("finish_reason") or finish
            content += delta.get("content") or ""
            for call in _objects(delta.get("tool_calls")):
                _extend(calls, call.get("index"), call.get("function") or {})
        if event.get("type") == "content_block_start":
            block = event.get("content_block") or {}
            if block.get("type") == "tool_use":
                _extend(calls, event.get("index"), {"name": block.get("name")})
        if event.get("type") == "content_block_delta":
            delta = event.get("delta") or {}
            content += delta.get("text") or ""
            if "partial_json" in delta:
                _extend(calls, event.get("index"), {"arguments": delta["partial_json"]})
        finish = (event.get("delta") or {}).get("stop_reason") or finish if "delta" in event else finish
    message = {"role": "assistant", "content": content, "tool_calls": [{"function": call} for call in calls.values()]}
    return {**answer, "type": "", "choices": [{"message": message, "finish_reason": finish}]}


def _extend(calls: dict[Any, dict[str, str]], index: Any, piece: Mapping[str, Any]) -> None:
    call = calls.setdefault(index, {"name": "", "arguments": ""})
    call["name"] += piece.get("name") or ""
    call["arguments"] += piece.get("arguments") or ""


def _messages_of(asked: Mapping[str, Any]) -> list[Any]:
    first = asked.get("instructions") or asked.get("system")
    rest = asked.get("messages") or asked.get("input") or []
    rest = [{"role": "user", "content": rest}] if isinstance(rest, str) else rest
    return [*([{"role": "system", "content": first}] if first else []), *(rest if isinstance(rest, list) else [rest])]


def _repeats(message: Any) -> bool:
    return isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in ECHOES)


def _read(message: Any) -> list[Message]:
    """A message of any protocol; one of Anthropic's that holds results of tools is several."""
    if not isinstance(message, dict):
        return [{"role": "?", "text": _text(message)}]
    kind, content = message.get("type"), message.get("content")
    parts = _objects(content)
    calls = [call.get("function") or call.get("custom") or {} for call in _objects(message.get("tool_calls"))]
    calls += [message] if kind == "function_call" else []
    calls += [{**part, "arguments": part.get("input")} for part in parts if part.get("type") == "tool_use"]
    results = [part for part in parts if part.get("type") == "tool_result"]
    said = [part for part in parts if part.get("type") not in ("tool_use", "tool_result", "thinking")]
    thoughts = [part.get("thinking") for part in parts if part.get("type") == "thinking"]
    if kind == "reasoning":
        thoughts, said = [_text(message.get("summary") or content)], []
    if kind == "function_call_output":
        results = [{"content": message.get("output")}]
    text = _text(said if parts or kind == "reasoning" else content) or _text(message.get("refusal"))
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning")) or "\n".join(filter(None, thoughts))
    role = message.get("role") or ("assistant" if kind in ECHOES else "tool")
    found: Message = {"role": role, "text": text}
    if reasoning:
        found["reasoning"] = reasoning
    if calls:
        found["calls"] = [{"name": _text(c.get("name")), "arguments": _text(c.get("arguments"))} for c in calls]
    told = [{"role": "tool", "text": _text(result.get("content"))} for result in results]
    return [*told, *([found] if text or reasoning or calls or not told else [])]


def _text(content: Any) -> str:
    """A content as text; what is none, such as an image, by its kind."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(map(_text, content))
    if isinstance(content, dict) and isinstance(text := content.get("text", content.get("refusal")), str):
        return text
    if isinstance(content, dict) and "type" in content and len(json.dumps(content)) > 2000:
        return f"[{content['type']}]"
    return json.dumps(content, ensure_ascii=False)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
