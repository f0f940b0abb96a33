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


def xml(*values: str, name: str = "find") -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in zip("ab", values, strict=False)
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def find(a: Any, **more: Any) -> Any:
    """A tool with the parameter a of some schema."""
    schema = {"type": "object", "properties": {"a": a, "b": {"type": "string"}}, **more}
    return {"type": "function", "function": {"name": "find", "parameters": schema}}


TEXT, NULL, NUMBER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
KEYS = {"$defs": {"Key": {"enum": ["1", "x"], "type": "string"}, "Size": {"type": "integer"}, "Loop": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("schema", "written", "wanted"),
    [
        *((schema, written, written)
          for written in ("12345", "null", "true", "True", "[1]", '{"a": 1}', "1e5", "")
          for schema in (TEXT, {"anyOf": [TEXT, NULL]}, {"oneOf": [NUMBER, TEXT]}, {"type": ["string", "null"]},
                         {"type": "string", "nullable": True}, {"enum": ["a", "b"]}, {"const": "a"},
                         {"$ref": "#/$defs/Key"}, {"$ref": "#/$defs/Absent"}, {"$ref": "other.json"},
                         {"allOf": [{"$ref": "#/$defs/Key"}]}, {"anyOf": [{"$ref": "#/$defs/Key"}, NULL]},
                         {"type": "string", "format": "date"}, {}, True, {"description": "anything"})),
        *((schema, "7", "7") for schema in ({"type": [[], 5]}, {"type": 5}, {"enum": 5}, {"anyOf": 5}, {"allOf": [5]},
                                            {"$ref": 5}, {"$ref": "#/a~b/0"}, {"anyOf": []}, False)),
        (NUMBER, "7", 7),
        (NUMBER, " 7 ", 7),
        (NUMBER, "7.5", 7.5),
        (NUMBER, "seven", "seven"),
        (NUMBER, "true", "true"),
        ({"type": "number"}, "-1e3", -1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"$ref": "#/$defs/Size"}, "7", 7),
        ({"anyOf": [{"$ref": "#/$defs/Size"}, NULL]}, "null", None),
        ({"anyOf": [NUMBER, NULL]}, "None", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["boolean", "null"]}, "False", False),
        ({"type": ["boolean", "string"]}, "True", "True"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [1, "2"]}, "2", "2"),
        ({"enum": [True, None]}, "null", None),
        ({"enum": [1]}, "True", "True"),
        ({"const": False}, "False", False),
        ({"type": "object"}, '{"k": "v"}', {"k": "v"}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"properties": {"k": TEXT}}, '{"k": "v"}', {"k": "v"}),
        ({"items": NUMBER}, "[1]", [1]),
        ({"type": "array"}, "[1,", "[1,"),
        ({"type": "array"}, '["\\ud800"]', '["\\ud800"]'),
    ],
)  # fmt: skip
def test_an_argument_in_xml_is_a_string_unless_its_schema_rules_that_out(schema, written, wanted):
    content, _, calls, malformed = read("xml", xml(written, "7"), tools=[find(schema, **KEYS)])
    assert (content, malformed) == ("", 0)
    (found,) = calls
    assert json.dumps(found) == json.dumps(("find", {"a": wanted, "b": "7"}))


def test_a_reference_to_itself_ends():
    loop = {"$ref": "#/$defs/Loop"}
    for target in (loop, {"anyOf": [loop] * 9}):
        tool = find(loop, **{"$defs": {"Loop": target}})
        assert read("xml", xml("7"), tools=[tool])[2] == [("find", {"a": "7"})]


def test_what_is_no_parameter_of_the_tool_is_a_string():
    assert read("xml", xml("7", name="unknown"), tools=[find(NUMBER)])[2] == [("unknown", {"a": "7"})]


def test_a_closing_tag_in_an_argument_belongs_to_it_or_the_text_keeps_its_order():
    inner = "x </parameter> y </function> z"
    assert read("xml", xml(inner, "7"), tools=[find(TEXT)])[2] == [("find", {"a": inner, "b": "7"})]
    for form, text in (
        ("xml", f"before {xml('x </tool_call> y')} after"),
        ("hermes", 'before <tool_call>{"name": "find", "arguments": {"a": "x </tool_call> y"}}</tool_call> after'),
    ):
        content, _, calls, malformed = read(form, text, tools=[find(TEXT)])
        places = [content.index(word) for word in ("before", "find", "x", "y", "after")]
        assert (places, calls, malformed) == (sorted(places), [], 1)
    unclosed = "<tool_call><function=find><parameter=a>1<parameter=b>2</parameter></function></tool_call>"
    assert read("xml", unclosed.replace("<parameter=b>2", "")[:-12] + "lost</tool_call>", tools=[find(TEXT)])[3] == 1


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


def logprobs_of(tokenizer: Any, ids: list[int]) -> list[dict[str, Any]]:
    return AnswerReader(tokenizer, "none").logprobs(
        Generation(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.STOP)
    )


@pytest.mark.parametrize(
    "text", ["hello world", "é«»🙂 日本\n\ttabs  ", "<think>x</think><|im_end|>", "", "\x00\x7f\xad"]
)
def test_logprobs_have_the_bytes_of_each_token_and_its_text(text):
    tokenizer = make_tokenizer("chat")
    entries = logprobs_of(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    for entry in entries:
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_pieces_of_sentencepiece_and_words_have_their_bytes_too():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581", "h", "i", "\u2581hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    entries = logprobs_of(PreTrainedTokenizerFast(tokenizer_object=model), [4, 1, 5 + 0xC3, 5 + 0xA9])
    assert [entry["bytes"] for entry in entries] == [[32, 104, 105], [32], [0xC3], [0xA9]]
    assert [entry["token"] for entry in entries] == [" hi", " ", "\ufffd", "\ufffd"]
    model = Tokenizer(models.WordLevel({"<unk>": 0, "h\u0120i": 1, "plain": 2}, unk_token="<unk>"))
    entries = logprobs_of(PreTrainedTokenizerFast(tokenizer_object=model), [1, 2])
    assert [entry["token"] for entry in entries] == ["h\u0120i", "plain"]


def test_a_tokenizers_own_response_template_types_arguments_alike():
    tokenizer = make_tokenizer("headers")
    arguments = {"tag_pattern": "<(?P<key>\\w+)>(?P<value>.*?)</\\w+>"}
    calls = {"open_pattern": r"<<(?P<name>\w+)", "close": ">>", "content": "xml-inline", "content_args": arguments}
    calls |= {"repeats": True, "transform": {"function": {"name": "{name}", "arguments": "{content}"}}}
    fields = {"content": {"content": "text"}, "tool_calls": calls}
    tokenizer.response_template = {"start_anchor": "never", "fields": fields}
    try:
        ids = tokenizer.encode("<<find <a>12</a><b>7</b> >>", add_special_tokens=False)
        generation = Generation(ids, [0.0] * len(ids), [0] * len(ids), FinishReason.STOP)
        for schema, wanted in ((NUMBER, 12), ({"anyOf": [NUMBER, TEXT]}, "12"), (TEXT, "12")):
            answer = AnswerReader(tokenizer).read(generation, "", [find(schema)])
            assert answer.calls[0]["function"] == {"name": "find", "arguments": {"a": wanted, "b": "7"}}
    finally:
        del tokenizer.response_template


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
