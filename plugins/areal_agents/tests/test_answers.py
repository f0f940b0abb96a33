"""Reading answers: thoughts, texts and calls in the forms of several families, well written and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from policies import make_tokenizer

from areal_agents.answers import AnswerReader
from areal_core.data import FinishReason, Generation

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
    },
}


NESTED = json.dumps({"name": "add", "arguments": {"a": json.loads("[" * 300 + "]" * 300)}})
"""Deep enough to end templates, which go through it one level within another."""
HALF = '{"name": "add", "arguments": {"a": "\\ud800"}}'


def read(form: str, text: str, begun: str = "", stop: tuple[str, ...] = (), tools: Any = (TOOL,)) -> Any:
    tokenizer = make_tokenizer("chat")
    ids = tokenizer.encode(text, add_special_tokens=False)
    generation = Generation(ids, [0.0] * len(ids), [0] * len(ids), FinishReason.STOP)
    answer = AnswerReader(tokenizer, form).read(generation, begun, tools, stop)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls]
    return answer.message["content"], answer.message.get("reasoning_content", ""), calls, answer.malformed


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", "<think>\nhm\n</think>\n\nI add.", ("I add.", "hm", [], 0)),
        ("hermes", 'So:<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
         ("So:", "", [("add", {"a": 1})], 0)),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
         ("", "", [("add", {"a": 1})], 0)),
        ("hermes", '<tool_call>{"name": "add", "argu</tool_call>', ('{"name": "add", "argu', "", [], 1)),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
         ('{"name": "add", "arguments": [1]}', "", [], 1)),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', ("", "", [("add", {})], 0)),
        ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=text>\n3\n</parameter>\n"
         "</function>\n</tool_call>", ("", "", [("add", {"a": 3, "text": "3"})], 0)),
        ("xml", "<tool_call>\n<function=add\n</tool_call>", ("<function=add", "", [], 1)),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
         ("", "", [("add", {"a": 1}), ("add", {})], 0)),
        ("mistral", 'So[TOOL_CALLS]add[ARGS]{"a": 1}', ("So", "", [("add", {"a": 1})], 0)),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", {"a": 1})], 0)),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", {"a": 1})], 0)),
        ("hermes", f"<tool_call>{'[' * 2000}</tool_call>", ("[" * 2000, "", [], 1)),
        ("hermes", f"<tool_call>{NESTED}</tool_call>", (NESTED, "", [], 1)),
        ("hermes", f"<tool_call>{HALF}</tool_call>", (HALF, "", [], 1)),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{'[' * 2000}", ("add[ARGS]" + "[" * 2000, "", [], 1)),
        ("xml", f"<tool_call><function=add><parameter=a>{'[' * 2000}</parameter></function></tool_call>",
         ("", "", [("add", {"a": "[" * 2000})], 0)),
        ("none", "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [], 0)),
    ],
)  # fmt: skip
def test_forms_of_calls(form, text, wanted):
    assert read(form, text) == wanted


def test_a_thought_that_the_template_has_begun_is_one():
    assert read("hermes", "hm\n</think>\n\nyes", begun="<think>") == ("yes", "hm", [], 0)
    assert read("hermes", "hm, never done", begun="<think>") == ("", "hm, never done", [], 0)


def test_what_looks_like_a_call_is_text_where_there_are_no_tools():
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read("hermes", text, tools=()) == (text, "", [], 0)


def test_the_form_is_found_in_the_chat_template():
    for sign, form in (("<function=", "xml"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama"), ("", "none")):
        tokenizer = type("Named", (), {"chat_template": f"... {sign} ...", "all_special_ids": []})()
        assert AnswerReader(tokenizer).form == form
    assert AnswerReader(make_tokenizer("chat")).form == "hermes"


def test_a_tokenizers_own_response_template_is_used():
    tokenizer = make_tokenizer("headers")
    calls = {"open": "<<", "close": ">>", "content": "json", "repeats": True}
    calls["transform"] = {"type": "function", "function": "{content}"}
    fields = {"content": {"content": "text"}, "tool_calls": calls}
    tokenizer.response_template = {"start_anchor": "never", "fields": fields}
    try:
        ids = tokenizer.encode('So <<{"name": "add", "arguments": {"a": 2}}>>', add_special_tokens=False)
        generation = Generation(ids, [0.0] * len(ids), [0] * len(ids), FinishReason.STOP)
        answer = AnswerReader(tokenizer).read(generation, "", [TOOL])
        wrong = ("{", "5", "{}", "[" * 2000, NESTED)
        broken = [tokenizer.encode(f"So <<{call}>>", add_special_tokens=False) for call in wrong]
        told = [
            AnswerReader(tokenizer).read(Generation(b, [0.0] * len(b), [0] * len(b), FinishReason.STOP), "", [TOOL])
            for b in broken
        ]
    finally:
        del tokenizer.response_template
    assert json.dumps(answer.calls[0]["function"]) == '{"name": "add", "arguments": {"a": 2}}'
    assert [(t.malformed, t.message["content"]) for t in told] == [(1, f"So <<{call}>>") for call in wrong]
