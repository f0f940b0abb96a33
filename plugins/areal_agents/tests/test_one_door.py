"""The same conversation has the same tokens through all protocols, and as a row of a data set."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from policies import Policy, make_tokenizer

from areal_core.chat.rows import read_prompt
from areal_core.chat.settings import PromptSettings

pytestmark = pytest.mark.slow

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROW = {
    "prompt": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add <|im_end|> é."},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call1"},
    ],
    "tools": [TOOL],
    "chat_template_kwargs": {"mood": "calm"},
}
SYSTEM, USER, ASSISTANT, RESULT = ROW["prompt"]
MOOD = "{% if mood %}<|im_start|>{{ mood }}<|im_end|>{% endif %}"


def changed(message: Any, **changes: Any) -> Any:
    """The message with other fields; a field that becomes `...` is gone."""
    return {name: value for name, value in {**message, **changes}.items() if value is not ...}


CHATS: dict[str, list[Any]] = {
    "as it is": [SYSTEM, USER, ASSISTANT, RESULT],
    "parts": [
        changed(SYSTEM, content=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]),
        changed(USER, content=[{"type": "text", "text": USER["content"]}]),
        ASSISTANT,
        changed(RESULT, content=[{"type": "text", "text": "2"}]),
    ],
    "nulls": [changed(m, name=None, refusal=None, audio=None, function_call=None) for m in ROW["prompt"]],
    "reasoning, vLLM's newer name": [SYSTEM, USER, changed(ASSISTANT, reasoning_content=..., reasoning="hm"), RESULT],
    "both names": [SYSTEM, USER, changed(ASSISTANT, reasoning="hm"), RESULT],
    "thinking": [SYSTEM, USER, changed(ASSISTANT, reasoning_content=..., thinking="hm"), RESULT],
    "arguments as an object": [
        SYSTEM,
        USER,
        changed(ASSISTANT, tool_calls=[changed(CALL, function={"name": "add", "arguments": {"a": 1}})]),
        RESULT,
    ],
    "developer": [changed(SYSTEM, role="developer"), USER, ASSISTANT, RESULT],
    "the function role": [SYSTEM, USER, ASSISTANT, changed(RESULT, role="function")],
}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "call1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call1", "output": "2"},
    ],
    "tools": [{"type": "function", "strict": False, **TOOL["function"]}],
    "chat_template_kwargs": {"mood": "calm"},
}
MESSAGES = {
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": USER["content"]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "call1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call1", "content": "2"}]},
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": PARAMETERS}],
}


@pytest.fixture
def asked(play):
    """Return the prompt tokens of each of some requests, as (path, body), or the words of its refusal."""

    def ask_all(template: str, requests: list[tuple[str, Any]], **settings: Any) -> list[Any]:
        policy = Policy(template, lambda _: "yes")
        answers: list[Any] = []

        async def agent(base_url: str, api_key: str) -> float:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
                await client.post(f"{base_url}/chat/completions", json={"messages": [USER]})
                for path, body in requests:
                    async with client.post(f"{base_url}/{path}", json=body) as response:
                        answer = await response.json()
                    answers.append(policy.said[-1][0] if response.status == 200 else answer["error"]["message"])
            return 1

        play(policy, agent, chat_template=MOOD + policy.tokenizer.chat_template, **settings)
        return answers

    return ask_all


def row_tokens(template: str, row: Any) -> list[int]:
    tokenizer = make_tokenizer(template)
    tokenizer.chat_template = MOOD + tokenizer.chat_template
    return read_prompt(tokenizer, row, PromptSettings()).input_ids


@pytest.mark.parametrize("template", ["chat", "thinking", "headers"])
def test_a_conversation_has_the_tokens_that_it_has_as_a_row(asked, template):
    wanted = row_tokens(template, ROW)
    settings = {"tools": [TOOL], "chat_template_kwargs": {"mood": "calm"}}
    chats = [("chat/completions", {"messages": messages, **settings}) for messages in CHATS.values()]
    for name, ids in zip(CHATS, asked(template, [*chats, ("responses", RESPONSES)]), strict=False):
        assert ids == wanted, name
    (responses,) = asked(template, [("responses", RESPONSES)])
    (messages,) = asked(template, [("messages", MESSAGES)], chat_template_kwargs={"mood": "calm"})
    assert responses == messages == wanted
    for messages in CHATS.values():
        assert row_tokens(template, {**ROW, "prompt": messages}) == wanted


def test_a_setting_of_the_template_gives_way_to_a_requests_own(asked):
    own = {"messages": [USER], "chat_template_kwargs": {"mood": "calm"}}
    plain = {"messages": [USER]}
    loud, calm = asked("chat", [("chat/completions", plain), ("chat/completions", own)],
                       chat_template_kwargs={"mood": "loud"})  # fmt: skip
    assert calm == row_tokens("chat", {"prompt": [USER], "chat_template_kwargs": {"mood": "calm"}})
    assert loud == row_tokens("chat", {"prompt": [USER], "chat_template_kwargs": {"mood": "loud"}})


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "messages[1] (user) has no content"),
        ({"role": "user", "content": 5}, "messages[1].content is a number"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "a part of type 'input_audio', which is not"),
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages[1].content[0] is an image"),
        ({"role": "user", "content": "\ud800"}, "surrogate"),
        ({"content": "x"}, "messages[1] has no role"),
        ({"role": "asistant", "content": "x"}, "message 1 has the role 'asistant'; it must be one of system, "),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0] has no name of a function"),
        ({"role": "assistant", "tool_calls": 5}, "messages[1].tool_calls[0] is a number"),
    ],
)
def test_what_a_row_may_not_hold_is_refused_in_the_same_words(asked, message, words):
    for path in ("chat/completions", "messages"):
        (refusal,) = asked("chat", [(path, {"messages": [USER, message], "max_tokens": 9})])
        assert words in refusal or "surrogates not allowed" in refusal


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"a"', "", "5", '{"a": "\\ud800"}', "[" * 5000])
def test_a_policys_own_malformed_arguments_come_back(asked, arguments):
    call = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]
    (ids,) = asked("chat", [("chat/completions", {"messages": messages})], max_tokens=20_000)
    assert isinstance(ids, list), ids


def test_the_tokens_of_prompt_and_answer_are_returned_if_they_are_asked_for(play):
    openai = pytest.importorskip("openai")
    policy = Policy("chat", lambda number: f"answer {number}")

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: Any = {"model": "any", "messages": [USER], "extra_body": {"return_token_ids": True}}
            done = await client.chat.completions.create(n=2, **asked)
            assert done.prompt_token_ids == policy.said[0][0]
            assert [choice.token_ids for choice in done.choices] == [said.output_ids for _, said in policy.said]
            pieces = [piece async for piece in await client.chat.completions.create(stream=True, **asked)]
            assert pieces[0].prompt_token_ids == policy.said[2][0]
            assert not any("prompt_token_ids" in piece.model_extra for piece in pieces[1:]), "they may be many"
            ids = [token for piece in pieces for token in getattr(piece.choices[0], "token_ids", ())]
            assert ids == policy.said[2][1].output_ids
            plain = await client.chat.completions.create(model="any", messages=[USER])
            assert "prompt_token_ids" not in plain.model_extra
        return 1

    assert "agents/other_sampling/return_token_ids" not in play(policy, agent).metrics
