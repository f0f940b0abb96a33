"""Turns that a policy wrote and an agent sends back are read as leniently as they were sampled; rows are not."""

from __future__ import annotations

import pytest

from areal_core.chat.messages import read_call, read_conversation, read_json
from areal_core.sdk import RowError

DEEP = '{"a": ' * 200 + "1" + "}" * 200
HALF = '{"a": "\\ud800"}'


@pytest.mark.parametrize(
    ("written", "sampled", "refused"),
    [
        ('{"a": 1}', {"a": 1}, ""),
        ({"a": 1}, {"a": 1}, ""),
        ('"{\\"a\\": 1}"', {"a": 1}, ""),
        ("", {}, ""),
        (None, {}, ""),
        ("null", {}, ""),
        ('{"a": 1', '{"a": 1', "is text that is not JSON"),
        ('"a"', "a", "is text that is not JSON"),
        ("[1]", [1], "is a list"),
        (DEEP, DEEP, "nested too deeply"),
        (HALF, HALF, "surrogates not allowed"),
    ],
)
def test_arguments_that_are_no_object_stay_where_a_policy_wrote_them(written, sampled, refused):
    call = {"function": {"name": "f", "arguments": written}}
    assert read_call(call, "c", sampled=True)["function"]["arguments"] == sampled
    if refused:
        with pytest.raises(RowError, match=refused):
            read_call(call, "c")
    else:
        assert read_call(call, "c")["function"]["arguments"] == sampled


def test_an_empty_turn_is_one_that_a_policy_may_write():
    turn = [{"role": "assistant", "content": None}]
    assert read_conversation(turn, "m", sampled=True) == [{"role": "assistant", "content": ""}]
    for messages, lenient in ((turn, False), ([{"role": "user", "content": None}], True)):
        with pytest.raises(RowError, match="has no content"):
            read_conversation(messages, "m", sampled=lenient)


def test_a_thought_under_two_names_is_one_thought():
    for names in (("reasoning",), ("reasoning", "reasoning_content"), ("thinking", "reasoning")):
        (message,) = read_conversation([{"role": "assistant", "content": "a", **dict.fromkeys(names, "hm")}], "m")
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


@pytest.mark.parametrize("text", ["{", DEEP, "[" * 100_000, HALF, '["\\uD800"]'])
def test_what_no_template_can_take_is_not_read(text):
    with pytest.raises(ValueError, match=r"JSON|delimiter|property name|nested|surrogates"):
        read_json(text)


def test_a_whole_character_in_two_escapes_is_read():
    assert read_json('"\\ud83d\\ude42"') == "🙂"
