"""Options of a request: honored, harmless, or named. None is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest

from areal_agents import anthropic_messages, openai_chat, openai_responses, token_generate

USER = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("structured_outputs", {"json": {}}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "[0-9]+"),
        ("guided_choice", ["a"]),
        ("response_format", {"type": "json_object"}),
        ("min_tokens", 5),
        ("stop_token_ids", [65]),
        ("ignore_eos", True),
        ("parallel_tool_calls", False),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("best_of", 3),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("prompt_logprobs", 0),
        ("top_logprobs", 2),
        ("logit_bias", {"5": -100}),
        ("seed", 0),
        ("temperature", 0),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("length_penalty", 2),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("truncate_prompt_tokens", 10),
        ("skip_special_tokens", False),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {"search_context_size": "low"}),
        ("an_option_of_next_year", 1),
    ],
)
def test_an_option_that_a_chat_does_not_follow_is_named(option, value):
    assert openai_chat.read({"messages": USER, option: value}).not_honored == (option,)


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "x"},
        {"temperature": None, "logit_bias": {}, "guided_json": None, "stop_token_ids": [], "seed": None},
        {"parallel_tool_calls": True, "top_logprobs": 0, "min_tokens": 0, "best_of": 1, "echo": False},
        {"response_format": {"type": "text"}, "modalities": ["text"], "ignore_eos": False},
        {"n": 2, "stop": ["x"], "max_tokens": 5, "logprobs": True, "stream": True, "stream_options": {}},
        {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "x"}], "return_token_ids": True},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
def test_what_changes_no_answer_or_is_honored_is_not_named(harmless):
    assert openai_chat.read({"model": "any", "messages": USER, **harmless}).not_honored == ()


def test_of_tools_it_is_named_that_nothing_forces_a_call_or_its_form():
    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        asked = openai_chat.read({"messages": USER, "tools": [TOOL], "tool_choice": choice})
        assert asked.not_honored == ("tool_choice",)
    assert openai_chat.read({"messages": USER, "tools": [strict]}).not_honored == ("tools.strict",)
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    asked = openai_responses.read({"input": "?", "tools": [flat]})
    assert (asked.not_honored, asked.tools) == (("tools.strict",), [TOOL])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"reasoning": {"effort": "low"}}, ("reasoning",)),
        ({"reasoning": {"effort": None, "summary": None}}, ()),
        ({"text": {"format": {"type": "text"}}}, ()),
        ({"text": {"format": {"type": "json_schema", "name": "x"}, "verbosity": "low"}},
         ("text.format", "text.verbosity")),
        ({"truncation": "auto", "background": True, "max_tool_calls": 1, "conversation": "c"},
         ("truncation", "background", "max_tool_calls", "conversation")),
        ({"truncation": "disabled", "background": False, "store": False}, ()),
        ({"include": ["reasoning.encrypted_content"]}, ()),
        ({"include": ["message.output_text.logprobs"]}, ("include",)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ()),
    ],
)  # fmt: skip
def test_options_of_responses(body, named):
    assert openai_responses.read({"model": "any", "input": "?", **body}).not_honored == named


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"thinking": {"type": "disabled"}}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ("thinking",)),
        ({"tool_choice": {"type": "any"}}, ("tool_choice",)),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         ("tool_choice.disable_parallel_tool_use",)),
        ({"top_k": 5, "context_management": {"edits": [1]}}, ("top_k", "context_management")),
        ({"messages": [*USER, {"role": "assistant", "content": "The answer"}]}, ("prefill",)),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "stop_sequences": ["x"]}, ()),
    ],
)  # fmt: skip
def test_options_of_messages(body, named):
    assert anthropic_messages.read({"model": "any", "max_tokens": 9, "messages": USER, **body}).not_honored == named


def test_options_of_token_ids():
    settings = {"max_tokens": 5, "n": 1, "stop": None, "logprobs": 1, "temperature": 1.0, "min_tokens": 2}
    asked = token_generate.read({"token_ids": [1], "sampling_params": settings, "features": {"a": 1}})
    assert asked.not_honored == ("features", "temperature", "min_tokens")
    plain = {"max_tokens": 5, "detokenize": True, "skip_special_tokens": True, "output_kind": 2, "stop_token_ids": []}
    assert token_generate.read({"token_ids": [1], "sampling_params": plain}).not_honored == ()
