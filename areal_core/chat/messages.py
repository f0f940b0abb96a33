"""The form of a conversation: messages and tools as people store them, read into one form.

The form is that of OpenAI's chat completions, which chat templates read: `role`, `content`, and where they exist
`reasoning_content`, `tool_calls`, `tool_call_id` and `name`. Keys that this module does not know reach the template as
they are. A form that is not understood raises `RowError`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from areal_core.interfaces.workflow import RowError

Message = dict[str, Any]
"""One message in the form that chat templates read. The arguments of calls are objects."""

ROLES: Final = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Names of roles in public data sets, and the role that each means."""
_CALLING: Final = ("function_call", "tool_call")
"""Roles whose content is a call in JSON."""
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
_IMAGE_PARTS: Final = ("image", "image_url", "input_image")
_THOUGHT_PARTS: Final = ("thinking", "reasoning")
_DEEPEST: Final = 100
"""Levels of nesting; chat templates recurse through them."""
_MAY_BE_NULL: Final = ("default", "const", "example")
"""Keywords of a JSON schema whose value may be null."""


def read_conversation(value: Any, where: str, *, images: bool = False, sampled: bool = False) -> list[Message]:
    """Return the messages of a conversation in one form.

    Accepted are OpenAI's messages, ShareGPT's (`from` and `value`), content as text or as a list of parts, Anthropic's
    blocks of calls and results, the roles in `ROLES`, calls with arguments as an object or as JSON, and a whole
    conversation as JSON. Null fields, which tables invent, are removed.

    Args:
        value: what the row holds.
        where: names the field in errors, such as "prompt".
        images: keep parts that are images; without it they are refused.
        sampled: the assistant's turns may be a policy's own, which is not always well formed: a turn may be empty, and
            the arguments of a call that are no object stay as they are.

    Raises:
        RowError: the form is not understood, or the conversation is empty.

    Example:
        >>> read_conversation([{"from": "human", "value": "hi"}], "prompt")
        [{'role': 'user', 'content': 'hi'}]
    """
    value = _parsed(value, where) if isinstance(value, str) else plain(value)
    if isinstance(value, Mapping):
        value = _transposed(value) or [dict(value)]
    if not isinstance(value, list):
        raise RowError(f"{where} is {type_name_of(value)}; it must be a list of messages, each with role and content")
    if not value:
        raise RowError(f"{where} is an empty list; a conversation has at least one message")
    messages: list[Message] = []
    for number, message in enumerate(value):
        place = f"{where}[{number}]"
        if not isinstance(message, Mapping):
            raise RowError(f"{place} is {type_name_of(message)}; it must be a message with role and content")
        messages += read_message(message, place, images=images, sampled=sampled)
    return messages


def read_message(
    message: Mapping[str, Any], where: str, *, images: bool = False, sampled: bool = False
) -> list[Message]:
    """Return a message in the one form. Results of tools in Anthropic's blocks become messages of their own, before it.

    For the arguments see `read_conversation`.

    Raises:
        RowError: the form is not understood.

    Example:
        >>> from areal_core.chat import ROLES, read_message
        >>> read_message({"from": "gpt", "value": "4"}, "prompt[1]")
        [{'role': 'assistant', 'content': '4'}]
        >>> ROLES["gpt"]
        'assistant'
        >>> result = {"type": "tool_result", "tool_use_id": "call_1", "content": "4"}
        >>> read_message({"role": "user", "content": [result, {"type": "text", "text": "and 3+3?"}]}, "prompt[2]")
        [{'role': 'tool', 'content': '4', 'tool_call_id': 'call_1'}, {'role': 'user', 'content': 'and 3+3?'}]
    """
    fields = _without_nulls(message)
    for place, text in strings(fields, where):
        check_text(text, place)
    role_name = fields.pop("role", None) if "role" in fields else fields.pop("from", None)
    if not isinstance(role_name, str) or not role_name:
        raise RowError(f"{where} has no role; it has {', '.join(message) or 'no keys'}")
    role_name = role_name.strip()
    role = ROLES.get(role_name.lower(), role_name)
    content = next((fields.pop(key) for key in ("content", "value", "text") if key in fields), None)
    calls = fields.pop("tool_calls", None) or fields.pop("function_call", None)
    if role_name.lower() in _CALLING:
        calls, content = content, ""
    read = _Content(where, images, sampled)
    read.take(content)
    # Servers that rename a field write the thought under both names.
    thoughts = [fields.pop(key) for key in _THOUGHTS if isinstance(fields.get(key), str)]
    details = fields.pop("reasoning_details", None) or ()  # OpenRouter's parts of the same thought
    if not thoughts:
        thoughts = ["".join(part.get("text") or "" for part in details if isinstance(part, Mapping))]
    read.thought = "".join(dict.fromkeys([*thoughts, read.thought]))
    if calls:
        calls = plain(_parsed(calls, f"{where}.tool_calls") if isinstance(calls, str) else calls)
        listed = calls if isinstance(calls, list) else [calls]
        read.calls += [
            read_call(call, f"{where}.tool_calls[{number}]", sampled=sampled) for number, call in enumerate(listed)
        ]
    has_more = bool(read.parts or read.calls or read.thought)
    if content is None and not has_more and not (sampled and role == "assistant"):
        raise RowError(f"{where} ({role}) has no content" + (" and calls no tool" if role == "assistant" else ""))
    if read.results and not has_more:
        return read.results
    normalized: Message = {"role": role, "content": read.content()}
    if read.thought:
        normalized["reasoning_content"] = read.thought
    if read.calls:
        normalized["tool_calls"] = read.calls
    return [*read.results, {**normalized, **fields}]


def _transposed(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return messages of a struct of lists, as some tables store a list of structs; None if it is none."""
    columns = {key: plain(column) for key, column in value.items()}
    if not all(isinstance(column, list) for column in columns.values()) or len({*map(len, columns.values())}) != 1:
        return None
    return [dict(zip(columns, fields, strict=True)) for fields in zip(*columns.values(), strict=True)]


def is_conversation(value: Any) -> bool:
    """Return whether a value has the outer form of a conversation: a list of objects that name a role.

    Example:
        >>> from areal_core.chat import is_conversation, looks_like_a_conversation
        >>> is_conversation([{"role": "user", "content": "2+2?"}])
        True
        >>> as_text = '[{"role": "user", "content": "2+2?"}]'  # stored as a string by mistake
        >>> is_conversation(as_text), looks_like_a_conversation(as_text)
        (False, True)
    """
    value = plain(value)
    value = [value] if isinstance(value, Mapping) else value
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and not message.keys().isdisjoint(("role", "from")) for message in value)
    )


def looks_like_a_conversation(text: str) -> bool:
    """Return whether a text is a conversation in JSON, or as Python prints one, that was meant as messages."""
    if not re.match(r"\s*(\[\s*)?\{", text):
        return False
    for read in (json.loads, ast.literal_eval):  # the second is what pandas writes into CSV files
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return is_conversation(value.get("messages", value) if isinstance(value, dict) else value)
    return False


def read_tools(value: Any, where: str = "tools") -> list[dict[str, Any]]:
    """Return function tools in the form that chat templates read: `{"type": "function", "function": {...}}`.

    Accepted are this form, the function alone, Anthropic's form with `input_schema`, and each of them as JSON.

    Args:
        value: what the row or the request holds; None and an empty list mean no tools.
        where: names the field in errors.

    Raises:
        RowError: a tool is none of these.

    Example:
        >>> from areal_core.chat import read_tools
        >>> read_tools({"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}}})
        [{'type': 'function', 'function': {'name': 'add',
          'parameters': {'type': 'object', 'properties': {'a': {'type': 'number'}}}}}]
    """
    value = plain(value)
    if isinstance(value, str) and value.strip():
        value = _parsed(value, where)
    if not value:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise RowError(f"{where} is {type_name_of(value)}; it must be a list of tools")
    return [_read_tool(tool, f"{where}[{number}]") for number, tool in enumerate(value)]


def read_call(call: Any, where: str, *, sampled: bool = False) -> dict[str, Any]:
    """Return a call of a tool as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.

    An `id` stays in front, where the call has one.

    Args:
        call: what the message holds.
        where: names it in errors.
        sampled: arguments that are no object stay as they are; see `read_conversation`.

    Raises:
        RowError: it has no name, or its arguments are no object.
    """
    call = _parsed(call, where) if isinstance(call, str) else call
    if not isinstance(call, Mapping):
        raise RowError(f"{where} is {type_name_of(call)}; a call is an object with a function")
    call = _without_nulls(call)
    function = call.get("function", call)
    if isinstance(function, str):  # {"function": "name", "arguments": ...}
        function = {**call, "name": function}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowError(f"{where} has no name of a function")
    written: Any = next((function[key] for key in ("arguments", "parameters", "input", "args") if key in function), {})
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    arguments = read_arguments(written) if sampled else _arguments(written, where)
    return {**call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(written: Any) -> Any:
    """Return the arguments of a call as an object if they are one, otherwise as they were written.

    JSON is parsed, also if it was encoded as JSON twice, as some data sets have it.

    Example:
        >>> from areal_core.chat import read_arguments
        >>> read_arguments('{"a": 2}')
        {'a': 2}
        >>> read_arguments("a = 2")  # a policy's own call need not be well formed
        'a = 2'
    """
    for _ in range(2):
        if not isinstance(written, str):
            break
        try:
            written = read_json(written or "{}")
        except ValueError:
            break
    return {} if written is None else written


def read_json(text: str) -> Any:
    """Parse a text as JSON, and refuse values that no chat template or tokenizer can use.

    Raises:
        ValueError: it is not JSON, has more than 100 levels, or has half a character (a lone surrogate).

    Example:
        >>> from areal_core.chat import read_json
        >>> read_json('{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> read_json("[" * 101 + "]" * 101)
        Traceback (most recent call last):
        ValueError: it is nested too deeply
    """
    try:
        normalized = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(normalized, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [normalized] if isinstance(normalized, dict | list) else []
    for _ in range(_DEEPEST):
        nested = (value.values() if isinstance(value, dict) else value for value in level)
        level = [part for parts in nested for part in parts if isinstance(part, dict | list)]
        if not level:
            return normalized
    raise ValueError("it is nested too deeply")


def plain(value: Any) -> Any:
    """Return an array or a tuple as a list, and any other value as it is. Only the outer level is converted.

    Tables return NumPy arrays where a row has a list.
    """
    if hasattr(value, "tolist") and not isinstance(value, bytes | str | Mapping):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def check_text(text: str, where: str) -> None:
    """Refuse a text that no tokenizer can read.

    Raises:
        RowError: it holds half a character (a lone surrogate).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            f"{where} holds half a character (a lone surrogate) at position {error.start}, which no tokenizer reads"
        ) from None


def strings(value: Any, where: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield every text in a nested value with the place where it stands.

    Raises:
        RowError: it is nested too deeply.
    """
    if depth > _DEEPEST:
        raise RowError(f"{where} is nested more than {_DEEPEST} levels deep")
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield where, str(key)
            yield from strings(part, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from strings(part, f"{where}[{number}]", depth + 1)


@dataclass
class _Content:
    """What the content of a message holds, taken apart.

    Attributes:
        where: names the message in errors.
        images: whether images are kept.
        sampled: see `read_conversation`.
        parts: text and images, in order.
        thought: of a reasoning model.
        calls: of tools.
        results: of tools, as messages.
    """

    where: str
    images: bool
    sampled: bool
    parts: list[dict[str, Any]] = field(default_factory=list)
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def take(self, content: Any) -> None:
        """Read a content: text, a part, or a list of parts."""
        content = plain(content)
        if content is None or content == "":
            return
        if isinstance(content, Mapping) and content.keys().isdisjoint(("type", "text")):
            raise RowError(f"{self.where}.content is an object; write it as text, such as JSON")
        listed = [content] if isinstance(content, str | Mapping) else content
        if not isinstance(listed, list):
            raise RowError(f"{self.where}.content is {type_name_of(content)}; it must be text or a list of parts")
        for number, part in enumerate(listed):
            self._take_part(part, f"{self.where}.content[{number}]")

    def content(self) -> str | list[dict[str, Any]]:
        """Return text, or parts where some are images."""
        if all(part["type"] == "text" for part in self.parts):
            return "".join(part["text"] for part in self.parts)
        return self.parts

    def _take_part(self, part: Any, where: str) -> None:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, Mapping):
            raise RowError(f"{where} is {type_name_of(part)}; a part is text or an object with a type")
        part = _without_nulls(part)
        kind = part.get("type", "text" if "text" in part else None)
        text = next((part[key] for key in ("text", "refusal", kind) if isinstance(part.get(key), str)), None)
        if kind in _IMAGE_PARTS:
            if not self.images:
                raise RowError(
                    f"{where} is an image, and this run shows the model none: choose workflow: vision/single_turn "
                    "(areal-vision), or take the images out of the data"
                )
            self.parts.append({**part, "type": "image"})
        elif kind in _TEXT_PARTS and text is not None:
            self.parts.append({"type": "text", "text": text})
        elif kind in _THOUGHT_PARTS and text is not None:
            self.thought += text
        elif kind == "tool_use":
            self.calls.append(read_call(part, where, sampled=self.sampled))
        elif kind == "tool_result":
            self._take_result(part, where)
        elif kind != "redacted_thinking":
            raise RowError(f"{where} is a part of type {kind!r}, which is not understood: text and images are")

    def _take_result(self, part: Mapping[str, Any], where: str) -> None:
        result = _Content(where, images=False, sampled=False)
        result.take(part.get("content"))
        named = {"tool_call_id": part["tool_use_id"]} if "tool_use_id" in part else {}
        self.results.append({"role": "tool", "content": result.content(), **named})


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    tool = _parsed(tool, where) if isinstance(tool, str) else tool
    if not isinstance(tool, Mapping):
        raise RowError(f"{where} is {type_name_of(tool)}; a tool is an object with a function")
    tool = _schema_without_nulls(tool)
    kind = tool.get("type", "function")
    function = tool.get("function", tool if "name" in tool else None)
    if isinstance(function, Mapping) and "input_schema" in function:
        function = {"name": function.get("name"), **function, "parameters": function["input_schema"]}
        function = {key: value for key, value in function.items() if key not in ("input_schema", "type")}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        hosted = f", of type {kind!r}" if kind not in ("function", "custom") else ""
        raise RowError(f"{where}{hosted} is no function with a name; a tool is a function that has one")
    schema = function.get("parameters", {})
    schema = _parsed(schema, f"{where}.parameters") if isinstance(schema, str) else schema
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not all(isinstance(part, Mapping | bool) for part in properties.values()):
        raise RowError(f"{where}: the parameters of {function['name']} are no JSON schema of an object")
    for place, text in strings(function, where):
        check_text(text, place)
    body = {**function, "parameters": schema} if "parameters" in function else dict(function)
    body.pop("type", None) if body.get("type") == "function" else None
    return {"type": "function", "function": body}


def _arguments(written: Any, where: str) -> dict[str, Any]:
    arguments = read_arguments(written)
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}.arguments")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}.arguments is {type_name_of(arguments)}; the arguments of a call are an object")
    return dict(arguments)


def _parsed(text: str, where: str) -> Any:
    try:
        return read_json(text)
    except json.JSONDecodeError:
        raise RowError(f"{where} is text that is not JSON: {text[:60]!r}") from None
    except ValueError as error:
        raise RowError(f"{where} is JSON that cannot be used: {error}") from None


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _schema_without_nulls(value: Any) -> Any:
    """Return a JSON schema without the nulls that a table puts in the place of missing keys, at any depth."""
    if isinstance(value, Mapping):
        return {
            key: _schema_without_nulls(part) for key, part in value.items() if part is not None or key in _MAY_BE_NULL
        }
    value = plain(value)
    return [_schema_without_nulls(part) for part in value] if isinstance(value, list) else value


def type_name_of(value: Any) -> str:
    """Name the type of a value in the words of JSON, for an error that a user reads."""
    names = {type(None): "null", str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else type(value).__name__)
