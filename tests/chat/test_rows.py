"""What a row and its settings give to the chat template; and that every entry gives the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_core.chat.rows import read_prompt
from areal_core.sdk import RowError, SkippedRowError
from areal_core.workflows.settings import SingleTurnSettings
from areal_finetuning.example_tokenizers import conversations, preferences
from tests.chat.conftest import PLAIN

HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}]


def asked(tokenizer: Any, row: dict[str, Any], **settings: Any) -> str:
    return read_prompt(tokenizer, row, SingleTurnSettings(**settings)).text


@pytest.mark.parametrize(
    ("row", "settings", "system"),
    [
        ({"prompt": HI}, {}, None),
        ({"prompt": HI}, {"system": "Think."}, "Think."),
        ({"prompt": [SYSTEM, *HI]}, {"system": "Think."}, "Be brief."),
        ({"prompt": HI, "system": "Of the row."}, {"system": "Think."}, "Of the row."),
        ({"prompt": "hi"}, {"system": "Think.", "chat_template": "always"}, "Think."),
    ],
)
def test_there_is_one_system_message(make_tokenizer, row, settings, system):
    text = asked(make_tokenizer(), row, **settings)
    assert text.count("system\n") == (system is not None)
    assert system is None or f"<|im_start|>system\n{system}<|im_end|>" in text


def test_arguments_of_the_template_come_from_the_row_before_the_settings(make_tokenizer):
    tokenizer, off = make_tokenizer(), {"enable_thinking": False}
    assert "<think>" not in asked(tokenizer, {"prompt": HI})
    assert asked(tokenizer, {"prompt": HI}, chat_template_kwargs=off).endswith("<think>\n\n</think>\n\n")
    assert asked(tokenizer, {"prompt": HI, "chat_template_kwargs": off}).endswith("</think>\n\n")
    assert asked(tokenizer, {"prompt": HI, "chat_template_kwargs": json.dumps(off)}).endswith("</think>\n\n")
    row = {"prompt": HI, "chat_template_kwargs": {"enable_thinking": True, "other": None}}
    assert "<think>" not in asked(tokenizer, row, chat_template_kwargs=off)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({}, {}, "has no 'prompt'; it has no keys: set workflow.prompt_key"),
        ({"question": "hi"}, {}, "has no 'prompt'; it has question: set workflow.prompt_key"),
        ({"prompt": None}, {}, "'prompt' is null; it must be text, or a list of messages"),
        ({"prompt": ""}, {}, "'prompt' is empty"),
        ({"prompt": json.dumps(HI)}, {}, "text that holds a whole conversation: store it as a list of messages"),
        ({"prompt": "hi", "tools": TOOLS}, {}, "text that is continued as it is, which takes no tools"),
        ({"prompt": "hi"}, {"system": "Think."}, "text that is continued as it is, which takes no workflow.system"),
        ({"prompt": "hi", "system": "Think."}, {}, "text that is continued as it is, which takes no system"),
        ({"prompt": "hi", "documents": ["x"]}, {}, "text that is continued as it is, which takes no documents"),
        ({"prompt": "hi"}, {"chat_template_kwargs": {"a": 1}}, "which takes no workflow.chat_template_kwargs"),
        ({"prompt": "hi", "tools": TOOLS}, {"text_has_special_tokens": True}, "leave it out, because the text was"),
        ({"prompt": json.dumps(HI, indent=2)}, {}, "text that holds a whole conversation"),
        ({"prompt": json.dumps({"messages": HI})}, {}, "text that holds a whole conversation"),
        ({"prompt": HI, "system": 3}, {}, "'system'"),
        ({"prompt": HI}, {"chat_template": "never"}, "is a list of messages, which needs a template"),
        ({"prompt": [*HI, {"role": "assistant", "content": "yes"}]}, {}, "ends with a turn of the assistant"),
        ({"prompt": HI, "chat_template_kwargs": {"tokenize": True}}, {}, "names tokenize, which the run decides"),
        ({"prompt": HI, "chat_template_kwargs": [1]}, {}, "'chat_template_kwargs' is a list; it must be an object"),
        ({"prompt": HI, "tools": ["calculator"]}, {}, r"'tools'\[0\] is text that is not JSON"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_field(make_tokenizer, row, settings, words):
    chosen = SingleTurnSettings(**settings)
    with pytest.raises(RowError, match=words):
        read_prompt(make_tokenizer(), row, chosen)
    assert chosen.check_row(row), "also before a run"


def test_a_column_called_tools_may_mean_something_else(make_tokenizer):
    row = {"prompt": HI, "tools": ["calculator"]}
    assert asked(make_tokenizer(), row, tools_key=None) == asked(make_tokenizer(), {"prompt": HI})


def test_checks_before_a_run_see_the_template(make_tokenizer):
    settings = SingleTurnSettings()
    assert settings.check_row({"prompt": HI}, make_tokenizer()) == ""
    assert "shows no tools" in settings.check_row({"prompt": HI, "tools": TOOLS}, make_tokenizer(PLAIN))
    finished = {"prompt": "<|im_start|>user\nhi<|im_end|>"}
    told = settings.check_row(finished, make_tokenizer())
    assert told.startswith("'prompt' spells '<|im_start|>', a special token of this model: set workflow.text_has")
    for choice in (True, False):
        assert SingleTurnSettings(text_has_special_tokens=choice).check_row(finished, make_tokenizer()) == ""


def test_a_prompt_that_fills_the_context_is_refused_or_skipped(make_tokenizer):
    tokenizer, row = make_tokenizer(), {"prompt": HI}
    tokenizer.model_max_length = len(read_prompt(tokenizer, row, SingleTurnSettings()).input_ids) + 1
    assert SingleTurnSettings().check_row(row, tokenizer) == ""
    tokenizer.model_max_length -= 1
    told = SingleTurnSettings().check_row(row, tokenizer)
    assert told.endswith("no answer has room. Shorten it, leave out the row, or set workflow.overlong: skip")
    with pytest.raises(SkippedRowError, match="no answer has room"):
        SingleTurnSettings(overlong="skip").check_row(row, tokenizer)


CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}
TALK = [
    SYSTEM,
    {"role": "user", "content": [{"type": "text", "text": "rain in Bern?", "image": None}]},
    {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [CALL], "name": None},
    {"role": "tool", "content": "dry", "tool_call_id": "call00001"},
]
ANSWER = {"role": "assistant", "content": "No rain."}


def test_a_conversation_with_tools_and_a_thought_has_the_same_tokens_in_every_entry(make_tokenizer):
    tokenizer = make_tokenizer()
    prompt = read_prompt(tokenizer, {"prompt": TALK, "tools": TOOLS}, SingleTurnSettings()).input_ids
    whole = [*prompt, *tokenizer.encode("No rain.<|im_end|>", add_special_tokens=False)]
    exact = {"max_tokens": None, "overlong": "refuse"}
    rows = (
        {"messages": [*TALK, ANSWER], "tools": TOOLS},
        {"messages": json.dumps([*TALK, ANSWER]), "tools": json.dumps(TOOLS)},
        {"prompt": TALK, "completion": [ANSWER], "tools": TOOLS},
        {"prompt": TALK, "completion": "No rain.", "tools": TOOLS},
    )
    for row in rows:
        (found,) = conversations(row, tokenizer, **exact)
        assert found.tokens["input_ids"].tolist() == whole
    wrong = {"role": "assistant", "content": "Rain."}
    for row in (
        {"prompt": TALK, "chosen": [ANSWER], "rejected": [wrong], "tools": TOOLS},
        {"chosen": [*TALK, ANSWER], "rejected": [*TALK, wrong], "tools": TOOLS},
    ):
        chosen, _ = preferences(row, tokenizer, **exact)
        assert chosen.tokens["input_ids"].tolist() == whole
