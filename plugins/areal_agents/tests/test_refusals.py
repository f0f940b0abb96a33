"""Requests that cannot be served are refused in words, and in the form of the protocol."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from policies import Policy

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "?"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


def broken(schema: Any) -> Any:
    """A tool whose parameters are none."""
    return {"type": "function", "function": {"name": "add", "parameters": schema}}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"messages": IMAGE}, "messages[0].content[0] is an image, and this run shows the model none"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "has the role 'wizard'; it must be one of"),
        ({"messages": USER, "tools": [{"type": "web_search"}]}, "a hosted tool of type 'web_search' is not served"),
        ({"messages": USER, "tools": [{"type": "function", "function": {}}]}, "tools[0] is no function with a name"),
        *(
            ({"messages": USER, "tools": [broken(schema)]}, "tools[0]: the parameters of add are no JSON schema")
            for schema in (5, {"properties": 5}, {"properties": {"a": 5}})
        ),
        ({"messages": USER, "tools": [broken("x")]}, "tools[0].parameters is text that is not JSON"),
        *(
            (
                {"messages": USER, "extra_body": {"chat_template_kwargs": {name: "x"}}},
                f"'chat_template_kwargs' names {name}, which the run decides",
            )
            for name in ("chat_template", "truncation", "max_length", "tools", "add_generation_prompt")
        ),
        ({"messages": USER, "stream": True, "stream_options": [1]}, "stream_options must be an object"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ["x"]}}]}]},
            "messages[0].tool_calls[0] has no name of a function",
        ),
        ({"messages": USER, "n": 0}, "n is 0; it must be a whole number from 1"),
        ({"messages": USER, "n": 99}, "asks for 99 more; the limit is 4 (workflow.max_answers)"),
        ({"messages": USER, "stop": [""]}, "stop must be a text or a list of texts"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            "the limit is 300 (workflow.max_tok",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(play, asked, told):
    policy = Policy("chat", lambda _: "yes")

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="any", **asked)
            assert told in caught.value.message
            assert caught.value.status_code in (400, 429)
            assert caught.value.body["type"] == "invalid_request_error"
            answer = await client.chat.completions.create(model="any", messages=USER)
        return float(answer.choices[0].message.content == "yes")

    assert play(policy, agent, max_tokens=300, max_answers=4).reward == 1


GOOD = b'{"messages": [{"role": "user", "content": "?"}]}'


@pytest.mark.parametrize(
    ("path", "headers", "body", "told"),
    [
        ("chat/completions", {"Content-Type": "application/json; charset=klingon"}, GOOD, "unknown encoding: klingon"),
        ("chat/completions", {"Content-Encoding": "gzip"}, GOOD, "Can not decode content-encoding: gzip"),
        ("chat/completions", {}, b"[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ("chat/completions", {}, b'{"a": ' * 300 + b"1" + b"}" * 300, "it is nested too deeply"),
        ("chat/completions", {}, GOOD[:-1] + rb', "model": "\uD800"}', "surrogates not allowed"),
        (
            "responses",
            {},
            b'{"input": [{"role": ["user"], "content": "?"}]}',
            "input[0] has no role",
        ),
        ("responses", {}, b'{"input": [{"type": "reasoning", "content": 5}]}', "content must be a list of objects"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(play, path, headers, body, told):
    policy = Policy("chat", lambda _: "yes")

    async def agent(base_url: str, api_key: str) -> float:
        headers["Authorization"] = f"Bearer {api_key}"
        # One connection a request: the web server gives up one whose body it cannot decode.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            async with client.post(f"{base_url}/{path}", data=body, headers=headers) as response:
                assert (response.status, response.content_type) == (400, "application/json")
                assert told in (await response.json())["error"]["message"]
            deep = {"function": {"name": "add", "arguments": "[" * 100_000}}
            messages = [{"role": "assistant", "content": "", "tool_calls": [deep]}, *USER]
            headers.pop("Content-Encoding", None)
            sound = {"Authorization": headers["Authorization"]}
            async with client.post(f"{base_url}/chat/completions", json={"messages": messages}, headers=sound) as done:
                assert done.status in (200, 400), await done.text()
            async with client.post(f"{base_url}/chat/completions", data=GOOD, headers=sound) as done:
                assert done.status == 200, await done.text()
        return 1

    assert play(policy, agent, max_tokens=1000).reward == 1
