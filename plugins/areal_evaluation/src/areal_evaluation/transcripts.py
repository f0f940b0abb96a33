"""What was said in an episode, message by message, whichever protocol an agent speaks; the model's words verbatim.

A message of a transcript has `role` and `text`; where there are such, `reasoning` and `calls` (name and arguments as
they were written); and `sampled`, true where the model under evaluation said it in this episode.
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
"""Items of OpenAI's responses that repeat what the model said."""
LONGEST_PART = 2000
"""Characters of a part that is no text and is shown as it is; a longer one, such as an image, by its kind."""


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
        number = next((n for n, known in enumerate(self._asked) if messages[: len(known)] == known), len(self._asked))
        if number == len(self._asked):
            self.conversations.append([])
            self._asked.append([])
        known, self._asked[number] = len(self._asked[number]), messages
        new = dropwhile(_repeats, messages[known:]) if known else messages
        self.conversations[number] += [*(message for one in new for message in _read(one)), *said]


def answers_of(answer: Mapping[str, Any]) -> list[Message]:
    """The messages of a whole answer in any of the protocols: one for each choice, or for each item."""
    said: list[Any] = [choice.get("message") for choice in _objects(answer.get("choices"))]
    said += _objects(answer.get("output"))
    if answer.get("type") == "message":
        said.append({"role": "assistant", "content": answer.get("content")})
    return [{**message, "sampled": True} for one in said for message in _read(one or {})]


def whole_answer(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer in pieces as it would have come whole; what is not told in pieces is not in it."""
    content, finish = "", None
    usage: dict[str, Any] = {}
    calls: dict[Any, dict[str, str]] = defaultdict(lambda: {"name": "", "arguments": ""})
    for event in events:
        match event:
            case {"type": "response.completed" | "response.incomplete", "response": dict(whole)}:
                return whole
            case {"type": "message_start", "message": {"usage": dict(told)}} | {"usage": dict(told)}:
                usage |= told
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


def _messages_of(asked: Mapping[str, Any]) -> list[Any]:
    first = asked.get("instructions") or asked.get("system")
    rest = asked.get("messages") or asked.get("input") or []
    rest = [{"role": "user", "content": rest}] if isinstance(rest, str) else rest
    return [*([{"role": "system", "content": first}] if first else []), *(rest if isinstance(rest, list) else [rest])]


def _repeats(message: Any) -> bool:
    return isinstance(message, dict) and (message.get("role") == "assistant" or message.get("type") in ECHOES)


def _read(message: Any) -> Iterator[Message]:
    """A message of any protocol; one of Anthropic's that holds results of tools is several."""
    found: Message = {"role": "?", "text": ""}
    thoughts, calls, has_results = [], [], False
    if isinstance(message, dict):
        found["role"] = message.get("role") or ("assistant" if message.get("type") in ECHOES else "tool")
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
                found["text"] += _text(part)
    if any(thoughts):
        found["reasoning"] = "\n".join(filter(None, thoughts))
    if calls:
        found["calls"] = calls
    if len(found) > 2 or found["text"] or not has_results:
        yield found


def _parts(message: Any) -> list[Any]:
    """The texts, thoughts, calls and results of calls in a message, as the blocks of Anthropic's messages are."""
    if not isinstance(message, dict) or message.get("type") in (*ECHOES, "function_call_output"):
        return [message]
    content, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    parts = [{"type": "thinking", "thinking": thought}, *(content if isinstance(content, list) else [content])]
    return [*parts, message.get("refusal"), *({"function": {}, **c} for c in _objects(message.get("tool_calls")))]


def _text(content: Any) -> str:
    """A content as text; what is none, such as an image, by its kind."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(map(_text, content))
        case {"text": str(text)} | {"refusal": str(text)}:
            return text
    told = json.dumps(content, ensure_ascii=False)
    return f"[{content['type']}]" if len(told) > LONGEST_PART and "type" in content else told


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
