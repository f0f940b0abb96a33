"""OpenAI's responses API: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from areal_agents.openai_chat import written_call
from areal_agents.options import not_honored
from areal_agents.requests import AgentRequest, RefusedError, objects, positive, tools_of
from areal_agents.streams import CONTENT, REASONING
from areal_core.chat import read_conversation, read_message, template_arguments
from areal_core.data import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from areal_agents.answers import AnswerReader
    from areal_agents.conversations import Turn
    from areal_agents.openai_chat import Event
    from areal_agents.streams import AnswerStream, Piece
    from areal_core.chat import Message

PREFIX = "resp_"
HONORED = frozenset(
    {
        "chat_template_kwargs",
        "documents",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "previous_response_id",
        "stream",
        "text",
        "tool_choice",
        "tools",
    }
)
"""Request keys that the endpoint honors; `_text_options` lists the parts of `text` that it does not honor."""
_EMPTY: Final[Mapping[str, dict[str, Any]]] = {
    "reasoning": {"content": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}
"""Fields of an item before its first delta, by item type."""
_TEXTS: Final = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}
"""Names of the events for an item's text or arguments, by item type."""


def read(body: Mapping[str, Any]) -> AgentRequest:
    """Parse a request.

    Raises:
        RefusedError: a key or an item has an invalid value, or the request needs a hosted tool.
        RowError: a message, a tool or a template argument is invalid.
    """
    input_value = body.get("input")
    items = [{"role": "user", "content": input_value}] if isinstance(input_value, str) else objects(body, "input")
    previous = str(body.get("previous_response_id") or "")
    messages = _messages(items)
    opening: list[Message] = []
    if body.get("instructions"):
        opening = read_conversation([{"role": "system", "content": body["instructions"]}], "instructions")
    # `strict` constrains the provider's decoding; the SDK sets it by default, so it is not counted as an option.
    tools = [{**tool, "strict": None} for tool in objects(body, "tools")]
    return AgentRequest(
        messages=messages if previous else [*opening, *messages],
        tools=tools_of({**body, "tools": tools}),
        template_arguments=template_arguments(body, {}),
        max_tokens=positive(body, "max_output_tokens"),
        previous=previous.removeprefix(PREFIX),
        opening=opening if previous else (),
        not_honored=(*not_honored(body, HONORED), *_text_options(body)),
        model=str(body.get("model") or ""),
    )


def _text_options(body: Mapping[str, Any]) -> list[str]:
    """Return the options of `text` that the endpoint does not honor: all except the plain format."""
    text = body.get("text")
    settings = text if isinstance(text, dict) else {}
    plain = {"format": {"type": "text"}, "verbosity": "medium"}
    return [f"text.{name}" for name, value in settings.items() if value is not None and value != plain.get(name)]


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages for a list of items. Reasoning and calls join the assistant message next to them."""
    listed: list[tuple[str, dict[str, Any]]] = []
    is_thought_open = False  # the last message holds only reasoning; its text and calls may follow

    def assistant(where: str) -> dict[str, Any]:
        """Return the trailing assistant message, or append a new one if the last message has another role."""
        if not listed or listed[-1][1]["role"] != "assistant":
            listed.append((where, {"role": "assistant", "content": ""}))
        return listed[-1][1]

    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type", "message")
        if kind == "reasoning":
            parts = objects(item, "content") or objects(item, "summary")
            message = assistant(where)
            is_thought_open = message["content"] == "" and "tool_calls" not in message
            thought = "".join(str(part.get("text", "")) for part in parts)
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls = assistant(where).setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            call_id = str(item.get("call_id", ""))
            listed.append((where, {"role": "tool", "content": item.get("output"), "tool_call_id": call_id}))
        elif kind == "message" and item.get("role") == "assistant" and is_thought_open:
            assistant(where)["content"] = item.get("content")
        elif kind == "message":
            listed.append((where, {"role": item.get("role"), "content": item.get("content")}))
        else:
            raise RefusedError(f"{where}: an item of type {kind!r:.40} is not served")
        is_thought_open = False
    return [read for where, message in listed for read in read_message(message, where, sampled=True)]


def write(body: Mapping[str, Any], turns: Sequence[Turn], reader: AnswerReader) -> dict[str, Any]:
    """Return the complete response."""
    del reader
    (turn,) = turns
    is_cut = turn.generation.finish_reason is FinishReason.LENGTH
    written, prompt_length = len(turn.generation.output_ids), turn.prompt.length
    used = {"input_tokens": prompt_length, "output_tokens": written, "total_tokens": prompt_length + written}
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    details = {"input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        **_begun(body, turn.identifier),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(turn),
        "usage": {**used, **details},
    }


def _begun(body: Mapping[str, Any], identifier: str) -> dict[str, Any]:
    """Return the response before its first item."""
    return {
        "id": PREFIX + identifier,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "incomplete_details": None,
        "model": str(body.get("model", "")),
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": None,
    }


def _items(turn: Turn) -> list[dict[str, Any]]:
    message, name = turn.answer.message, turn.identifier
    items = [_text_item(REASONING, name, 0, thought)] if (thought := message.get(REASONING)) else []
    if message[CONTENT] or not turn.answer.calls:
        items.append(_text_item(CONTENT, name, len(items), message[CONTENT]))
    return items + _call_items(turn)


def _text_item(field: str, name: str, number: int, text: str) -> dict[str, Any]:
    if field == REASONING:
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{name}_{number}", "summary": [], "content": content}
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    header = {"type": "message", "id": f"msg_{name}_{number}", "role": "assistant", "status": "completed"}
    return {**header, "content": content}


def _call_items(turn: Turn) -> list[dict[str, Any]]:
    items = []
    for number, call in enumerate(turn.answer.calls):
        header = {"type": "function_call", "id": f"fc_{turn.identifier}_{number}", "call_id": call["id"]}
        items.append({**header, "status": "completed", **written_call(call)["function"]})
    return items


async def stream(body: Mapping[str, Any], answers: AnswerStream, reader: AnswerReader) -> AsyncIterator[Event]:
    """Yield the same response as stream events.

    Text that continues the reasoning after other text is an item of its own.
    """
    events = _Events(answers.identifier)
    begun = _begun(body, answers.identifier)
    yield events.one("response.created", response=begun)
    yield events.one("response.in_progress", response=begun)
    async for piece in answers.pieces():
        for event in events.text(piece):
            yield event
    for event in events.end_text():
        yield event
    (turn,) = answers.turns
    for item in _call_items(turn) if events.items else _items(turn):
        for event in events.item(item):
            yield event
    whole = {**write(body, answers.turns, reader), "output": events.items}
    yield events.one(f"response.{whole['status']}", response=whole)


class _Events:
    """Writes the events of one response.

    Args:
        name: identifier of the response.

    Attributes:
        items: items that have ended. They follow one another.
    """

    def __init__(self, name: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._name = name
        self._number = -1
        self._field = ""  # of the text item that has begun
        self._text = ""
        self._at: dict[str, Any] = {}

    def one(self, kind: str, **data: Any) -> Event:
        """Return an event with the next number."""
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number, **data}

    def text(self, piece: Piece) -> Iterator[Event]:
        """Yield the events for new text. Text of another field begins a new item."""
        if piece.field != self._field:
            yield from self.end_text()
            self._field = piece.field
            yield from self._begin(_text_item(piece.field, self._name, len(self.items), ""))
        self._text += piece.text
        yield self._delta("reasoning" if piece.field == REASONING else "message", piece.text)

    def end_text(self) -> Iterator[Event]:
        """Yield the events that end the text item, if one has begun."""
        if self._field:
            yield from self._end(_text_item(self._field, self._name, len(self.items), self._text))
        self._field = self._text = ""

    def item(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events for a complete item."""
        yield from self._begin(item)
        yield self._delta(item["type"], item.get("arguments", ""))
        yield from self._end(item)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        empty = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        yield self.one("response.output_item.added", output_index=len(self.items), item=empty)
        self._at = {"item_id": item["id"], "output_index": len(self.items)}
        if item["type"] != "function_call":
            self._at["content_index"] = 0
        if item["type"] == "message":
            yield self.one("response.content_part.added", **self._at, part={**item["content"][0], "text": ""})

    def _delta(self, kind: str, text: str) -> Event:
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return self.one(f"response.{_TEXTS[kind]}.delta", **self._at, delta=text, **more)

    def _end(self, item: dict[str, Any]) -> Iterator[Event]:
        done = f"response.{_TEXTS[item['type']]}.done"
        if item["type"] == "function_call":
            yield self.one(done, **self._at, arguments=item["arguments"], name=item["name"])
        elif item["type"] == "reasoning":
            yield self.one(done, **self._at, text=item["content"][0]["text"])
        else:
            (part,) = item["content"]
            yield self.one(done, **self._at, text=part["text"], logprobs=[])
            yield self.one("response.content_part.done", **self._at, part=part)
        yield self.one("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
