"""Conversations and tools in the forms in which people store them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from areal_core.chat.messages import is_conversation, looks_like_a_conversation, read_conversation, read_tools
from areal_core.sdk import RowError

HI = [{"role": "user", "content": "hi"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (HI, HI),
        (HI[0], HI),
        (json.dumps(HI), HI),
        (tuple(HI), HI),
        (np.array(HI, dtype=object), HI),
        ([{"from": "human", "value": "hi"}], HI),
        ([{"role": "Human", "content": "hi"}], HI),
        ([{"role": "user", "content": "hi", "name": None, "tool_calls": None}], HI),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "h", "image": None}, {"type": "text", "text": "i"}],
                }
            ],
            HI,
        ),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], HI),
        ([{"role": "user", "content": ["h", "i"]}], HI),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], HI),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": "hi", "name": "ann"}], [{"role": "user", "content": "hi", "name": "ann"}]),
        ([{"from": "gpt", "value": "yes"}], [{"role": "assistant", "content": "yes"}]),
        ([{"role": "developer", "content": "x"}], [{"role": "developer", "content": "x"}]),
        ([{"role": "critic", "content": "x"}], [{"role": "critic", "content": "x"}]),
    ],
)
def test_a_conversation_is_read(written, read):
    assert read_conversation(written, "prompt") == read


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_one_name(name):
    (message,) = read_conversation([{"role": "assistant", "content": "4", name: "add"}], "prompt")
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "add"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [CALL]},
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}]},
        {"tool_calls": [{**CALL, "function": {"name": "weather", "arguments": json.dumps('{"town": "Bern"}')}}]},
        {"tool_calls": [{"name": "weather", "arguments": {"town": "Bern"}}]},
        {"tool_calls": [{"name": "weather", "parameters": {"town": "Bern"}}]},
        {"tool_calls": {"name": "weather", "arguments": {"town": "Bern"}}},
        {"tool_calls": json.dumps([CALL])},
        {"function_call": {"name": "weather", "arguments": '{"town": "Bern"}'}},
        {"content": [{"type": "tool_use", "name": "weather", "input": {"town": "Bern"}}]},
    ],
)
def test_a_call_of_a_tool_is_read(fields):
    assert read_conversation([{"role": "assistant", **fields}], "prompt") == CALLED


def test_calls_and_results_of_sharegpt_and_anthropic():
    sharegpt = [{"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"town": "Bern"}})}]
    assert read_conversation([*sharegpt, {"from": "observation", "value": "dry"}], "prompt") == [
        *CALLED,
        {"role": "tool", "content": "dry"},
    ]
    blocks = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "dry"}]}, "And now?"]
    assert read_conversation([{"role": "user", "content": blocks}], "prompt") == [
        {"role": "tool", "content": "dry", "tool_call_id": "c1"},
        {"role": "user", "content": "And now?"},
    ]


def test_an_explicit_null_among_the_arguments_stays():
    call = {"name": "weather", "arguments": {"town": None}}
    (message,) = read_conversation([{"role": "assistant", "tool_calls": [call]}], "prompt")
    assert message["tool_calls"][0]["function"]["arguments"] == {"town": None}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (None, r"^prompt is null; it must be a list of messages"),
        (12, r"^prompt is a number"),
        ("hi", r"^prompt is text that is not JSON: 'hi'"),
        ([], r"^prompt is an empty list"),
        (["hi"], r"^prompt\[0\] is text; it must be a message with role and content"),
        ([*HI, {"content": "hi"}], r"^prompt\[1\] has no role; it has content"),
        ([{"role": "user"}], r"^prompt\[0\] \(user\) has no content$"),
        ([{"role": "user", "content": None}], r"^prompt\[0\] \(user\) has no content$"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], r"\(assistant\) has no content and calls no tool"),
        ([{"role": "user", "content": 12}], r"^prompt\[0\].content is a number; it must be text or a list of parts"),
        ([{"role": "user", "content": "\ud83d"}], r"^prompt\[0\].content holds half a character"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}],
            r"content\[0\] is an image",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"a part of type 'audio', which is not understood"),
        ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], r"tool_calls\[0\] has no name of a function"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{oops"}]}],
            "arguments is text that is not",
        ),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}], r"arguments is a list"),
    ],
)
def test_what_is_no_conversation_is_refused_by_field(written, words):
    with pytest.raises(RowError, match=words):
        read_conversation(written, "prompt")


def test_images_are_kept_where_they_are_shown():
    parts = [{"type": "image_url", "image_url": {"url": "cat.png"}}, {"type": "text", "text": "what?"}]
    (message,) = read_conversation([{"role": "user", "content": parts}], "prompt", images=True)
    assert [part["type"] for part in message["content"]] == ["image", "text"]


SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}


@pytest.mark.parametrize(
    "written",
    [
        [{"type": "function", "function": FUNCTION}],
        [FUNCTION],
        {"type": "function", "function": FUNCTION},
        json.dumps([FUNCTION]),
        [json.dumps(FUNCTION)],
        [{"name": "weather", "input_schema": SCHEMA}],
        [{"type": "function", "function": {**FUNCTION, "description": None, "parameters": json.dumps(SCHEMA)}}],
        [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
            "town": {"type": "string", "enum": None}, "other": None}}}}],
    ],
)  # fmt: skip
def test_tools_are_read(written):
    assert read_tools(written) == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("nothing", [None, [], "", np.array([])])
def test_no_tools(nothing):
    assert read_tools(nothing) == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ([{"type": "web_search"}], r"^tools\[0\], of type 'web_search' is no function with a name"),
        (["calculator"], r"^tools\[0\] is text that is not JSON"),
        ([{"name": "f", "parameters": {"properties": {"a": "string"}}}], "no JSON schema of an object"),
        (7, r"^tools is a number"),
    ],
)
def test_what_is_no_tool_is_refused(written, words):
    with pytest.raises(RowError, match=words):
        read_tools(written)


def test_a_default_of_null_in_a_schema_stays():
    schema = {"type": "object", "properties": {"unit": {"type": ["string", "null"], "default": None}}}
    (tool,) = read_tools([{"name": "f", "parameters": schema}])
    assert tool["function"]["parameters"] == schema


def test_text_that_is_a_conversation_is_recognized():
    assert looks_like_a_conversation(json.dumps(HI))
    assert looks_like_a_conversation('[{"from": "human", "value": "hi"}]')
    assert looks_like_a_conversation(str(HI)), "as pandas writes it into a CSV file"
    assert not looks_like_a_conversation("[{not json")
    assert not looks_like_a_conversation('[{"answer": 4}]')
    assert is_conversation(HI)
    assert not is_conversation("hi")


def test_a_struct_of_lists_is_a_list_of_messages():
    assert read_conversation({"role": ["user", "assistant"], "content": ["hi", "yo"]}, "messages") == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]


def test_the_details_of_a_thought_are_the_thought():
    parts = [{"type": "reasoning.text", "text": "add"}]
    (message,) = read_conversation([{"role": "assistant", "content": "4", "reasoning_details": parts}], "messages")
    assert message["reasoning_content"] == "add"


def test_an_object_as_content_is_refused():
    with pytest.raises(RowError, match=r"^prompt\[0\].content is an object; write it as text, such as JSON"):
        read_conversation([{"role": "tool", "content": {"rain": 0}}], "prompt")
