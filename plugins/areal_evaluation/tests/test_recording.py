"""The proxy between OpenAI's SDK and a server that answers well, badly, slowly or not at all."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
import urllib.request
from typing import Any

import aiohttp
import pytest

from areal_core.errors import RunError
from areal_evaluation import address as address_module
from areal_evaluation.address import Address, check_endpoint
from areal_evaluation.recording import RecordingProxy
from areal_evaluation.transcripts import Transcript, answers_of, whole_answer

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("RIGHT_KEY", "right")
    return "RIGHT_KEY"


def recorded(url, key, agent, **settings):
    """What is recorded of an agent, a coroutine function of an SDK's client."""

    async def play() -> Any:
        address = Address(url, "sum-9", key, **settings)
        limits = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(headers=address.headers, timeout=limits) as client,
            RecordingProxy(address, client) as proxy,
        ):
            with proxy.episode() as recording:
                where = recording.endpoint
                async with openai.AsyncOpenAI(base_url=where.base_url, api_key=where.api_key, max_retries=0) as sdk:
                    await agent(sdk.chat.completions)
        return recording

    return asyncio.run(play())


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_with_a_tool_is_one_transcript(sums_server, key):
    async def agent(chat):
        messages = [{"role": "system", "content": "Be brief."}, user("1 and 2, with a tool")]
        first = (await chat.create(model="mine", messages=messages, tools=[TOOL])).choices[0].message
        assert first.tool_calls[0].function.name == "add"
        messages += [first, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
        second = await chat.create(model="mine", messages=messages, tools=[TOOL])
        assert second.choices[0].message.content == "3"

    recording = recorded(sums_server, key, agent)
    assert recording.transcript.conversations == [
        [
            {"role": "system", "text": "Be brief."},
            {"role": "user", "text": "1 and 2, with a tool"},
            {
                "role": "assistant",
                "text": "<b>I call & wait</b>",
                "calls": [{"name": "add", "arguments": '{"a": 1}'}],
                "sampled": True,
            },
            {"role": "tool", "text": "3"},
            {"role": "assistant", "text": "3", "sampled": True},
        ]
    ]
    assert (recording.answers, recording.calls, recording.last) == (2, 1, "3")
    assert (recording.tokens, recording.prompt_tokens) == (len("<b>I call & wait</b>3"), 14)


def test_other_conversations_stand_by_themselves_and_a_stream_is_one_answer(sums_server, key):
    async def agent(chat):
        await asyncio.gather(*(chat.create(model="x", messages=[user(f"{n} and 1")]) for n in (1, 2)))
        stream = await chat.create(model="x", messages=[user("90 and 10")], stream=True)
        pieces = [piece.choices[0].delta.content or "" async for piece in stream]
        assert pieces == ["1", "0", "0", ""]

    recording = recorded(sums_server, key, agent)
    assert sorted(talk[-1]["text"] for talk in recording.transcript.conversations) == ["100", "2", "3"]
    assert (recording.answers, recording.tokens, recording.failed_requests) == (3, 5, 0)


def test_a_request_that_is_not_unicode_is_refused_and_not_recorded(sums_server, key):
    async def agent(chat):
        client = chat._client  # it refuses to send such a text
        body = json.dumps({"model": "x", "messages": [user("1 and \udcff")]}).encode()
        headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{client.base_url}chat/completions", body, headers)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(direct.open, request)
        assert refused.value.code == 400
        assert b"not valid Unicode" in refused.value.read()
        await chat.create(model="x", messages=[user("1 and 1")])

    recording = recorded(sums_server, key, agent)
    assert [talk[0]["text"] for talk in recording.transcript.conversations] == ["1 and 1"]


def test_a_sign_whose_halves_come_in_two_pieces_of_a_stream_is_one_sign(sums_server, key):
    async def agent(chat):
        stream = await chat.create(model="x", messages=[user("halves of a sign")], stream=True)
        assert len([piece async for piece in stream]) == 3

    assert recorded(sums_server, key, agent).last == "\N{GRINNING FACE}"


@pytest.mark.parametrize(("temperature", "said"), [(None, "sum-9 0.3"), (0.0, "sum-9 0.0")])
def test_the_model_is_the_one_that_is_asked_for_and_so_is_the_temperature(sums_server, key, temperature, said):
    async def agent(chat):
        await chat.create(model="another", messages=[user("which temperature?")], temperature=0.3)

    assert recorded(sums_server, key, agent, temperature=temperature).last == said


@pytest.mark.parametrize(
    ("asked", "status", "told"),
    [
        ("500", 500, "the endpoint answered 500: .*out of <order>"),
        ("elsewhere", 502, "the endpoint answered 307: it redirects to http://127.0.0.1:1/v1"),
        ("nonsense", 502, "the endpoint answered 200, but not with JSON: <html>welcome</html>"),
        ("other json", 502, r'the endpoint answered 200, but not with an answer of a model: {"detail": \["no"\]}'),
        ("surrogate", 502, r"the endpoint answered with text that is not valid Unicode: .*sign: .ud83d"),
        ("hang", 504, r"the endpoint has not answered within 1 s \(--request-timeout\)"),
    ],
)
def test_an_answer_that_is_none_is_told_as_what_it_is(sums_server, key, asked, status, told):
    async def agent(chat):
        with pytest.raises(openai.APIStatusError) as refused:
            await chat.create(model="x", messages=[user(asked)])
        assert refused.value.status_code == status

    limit = 1.0 if asked == "hang" else 600.0
    recording = recorded(sums_server, key, agent, request_timeout_s=limit)
    assert re.match(told, recording.fault), recording.fault
    assert (recording.answers, recording.failed_requests) == (0, 1)
    (talk,) = recording.transcript.conversations
    assert talk == [{"role": "user", "text": asked}, {"role": "endpoint", "text": recording.fault}]


def test_an_answer_that_breaks_off_breaks_off_for_the_agent_too(sums_server, key):
    async def agent(chat):
        stream = await chat.create(model="x", messages=[user("break off 100")], stream=True)
        with pytest.raises(Exception, match=r"(?i)closed|connection|incomplete|peer"):
            async for _ in stream:
                pass

    recording = recorded(sums_server, key, agent)
    assert (recording.answers, recording.failed_requests) == (0, 1)
    assert "the endpoint cannot be reached" in recording.fault


def test_an_agent_that_gives_up_waiting_is_noted(sums_server, key):
    async def agent(chat):
        with pytest.raises(openai.APITimeoutError):
            await chat.create(model="x", messages=[user("hang")], timeout=0.5)

    assert recorded(sums_server, key, agent).fault == "the agent gave up waiting for the endpoint"


def test_a_key_that_is_none_reaches_nobody(sums_server, key):
    async def agent(chat):
        other = openai.AsyncOpenAI(base_url=chat._client.base_url, api_key="sk-areal-other", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="belongs to no episode"):
            await other.chat.completions.create(model="x", messages=[user("1")])

    assert recorded(sums_server, key, agent).answers == 0


def looked_for(url, variable=""):
    async def look() -> None:
        address = Address(url, "m", variable)
        async with aiohttp.ClientSession(headers=address.headers) as client:
            await check_endpoint(address, client)

    asyncio.run(look())


def test_an_address_is_looked_for_before_anything_is_asked(sums_server, key, monkeypatch):
    looked_for(sums_server, key)
    with pytest.raises(RunError, match=r"refuses a request without a key \(401\)"):
        looked_for(sums_server)
    monkeypatch.setenv("WRONG_KEY", "wrong-and-secret")
    with pytest.raises(RunError, match=r"refuses the key in WRONG_KEY \(401\)") as refused:
        looked_for(sums_server, "WRONG_KEY")
    assert "wrong-and-secret" not in str(refused.value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        monkeypatch.setattr(address_module, "PROBE_TIMEOUT_S", 0.5)
        with pytest.raises(RunError, match=r"did not answer within 0\.5 s"):
            looked_for(url)
    with pytest.raises(RunError, match=r"cannot be reached: .*onnect"):
        looked_for(url)


def test_responses_and_messages_are_read_as_well():
    transcript = Transcript()
    item = {"type": "function_call", "name": "add", "arguments": "{}"}
    answer = {"output": [{"type": "reasoning", "summary": [{"text": "hm"}]}, item]}
    transcript.add({"instructions": "Be brief.", "input": [user("?")]}, answers_of(answer))
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    transcript.add(
        {"instructions": "Be brief.", "input": [user("?"), *answer["output"], result]},
        answers_of({"output": [{"type": "message", "role": "assistant", "content": [{"text": "Three."}]}]}),
    )
    (talk,) = transcript.conversations
    assert [(m["role"], m["text"], "sampled" in m) for m in talk] == [
        ("system", "Be brief.", False),
        ("user", "?", False),
        ("assistant", "", True),
        ("assistant", "", True),
        ("tool", "3", False),
        ("assistant", "Three.", True),
    ]
    assert talk[2]["reasoning"] == "hm"
    assert talk[3]["calls"] == [{"name": "add", "arguments": "{}"}]
    content = [{"type": "text", "text": "I add."}, {"type": "tool_use", "name": "add", "input": {"a": 1}}]
    (said,) = answers_of({"type": "message", "content": content})
    assert (said["text"], said["calls"]) == ("I add.", [{"name": "add", "arguments": '{"a": 1}'}])


def test_streams_of_other_protocols_are_read_as_well():
    block, start, end = "content_block_delta", "content_block_start", {"stop_reason": "max_tokens"}
    call, text = {"type": "tool_use", "name": "add", "input": {}}, {"type": "text_delta", "text": "I add."}
    pieces = ({"type": "input_json_delta", "partial_json": piece} for piece in ('{"a"', ": 1}"))
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}},
        {"type": block, "index": 0, "delta": text},
        {"type": start, "index": 1, "content_block": call},
        *({"type": block, "index": 1, "delta": piece} for piece in pieces),
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 9}},
    ]
    answer = whole_answer(events)
    (said,) = answers_of(answer)
    assert (said["text"], said["calls"]) == ("I add.", [{"name": "add", "arguments": '{"a": 1}'}])
    assert answer["usage"] == {"input_tokens": 5, "output_tokens": 9}
    assert answer["choices"][0]["finish_reason"] == "max_tokens"
    whole = {"output": [{"type": "message", "role": "assistant", "content": [{"text": "Three."}]}]}
    events = [
        {"type": "response.output_text.delta", "delta": "Three."},
        {"type": "response.completed", "response": whole},
    ]
    assert whole_answer(events) == whole
