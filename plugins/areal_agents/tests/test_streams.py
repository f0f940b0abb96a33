"""Answers that are sent while they are generated."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from policies import Policy

from areal_agents.answers import AnswerReader
from areal_agents.streams import GrowingText
from areal_core.data import FinishReason, Generation
from areal_core.errors import RunError

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
PARTS = [
    *(
        "I think",
        " that",
        "\n",
        "  ",
        "\n\n",
        "naïve café",
        "日本語",
        "👩\u200d🔬",
        "a < b",
        "<",
        "\ufffd",
        ".",
        "  \n",
    ),
    *("<think>", "</think>", "<think", "<tool", CALL, "<tool_call>{</tool_call>"),
    '{"name": "add", "parameters": {}}',
]


@pytest.mark.parametrize("form", ["hermes", "xml", "mistral", "llama", "none"])
@pytest.mark.parametrize("opened", ["", "<think>\n"])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_text_that_is_sent_early_begins_the_complete_message(form, opened, tools):
    """Random answers in random pieces: what was sent is never taken back, and the end sends the rest."""
    policy = Policy("chat", str)
    reader = AnswerReader(policy.tokenizer, form)
    generator = random.Random(f"{form}{opened}{tools}")
    prompt = policy.tokenizer.encode(f"<|im_start|>assistant\n{opened}", add_special_tokens=False)
    early = 0
    for _ in range(300):
        text = "".join(generator.choices(PARTS, k=generator.randint(1, 8)))
        ids = [*policy.spell(text), policy.tokenizer.eos_token_id]
        growing, sent = GrowingText(reader, prompt, tools), {"reasoning_content": "", "content": ""}
        while ids:
            size = generator.randint(1, 6)
            for field, piece in growing.add(ids[:size]):
                assert piece, "a piece has text"
                sent[field] += piece
            ids = ids[size:]
        ids = [*policy.spell(text), policy.tokenizer.eos_token_id]
        generation = Generation(ids, [-1.0] * len(ids), [0] * len(ids), FinishReason.STOP)
        message = reader.read(generation, reader.begun(prompt), tools).message
        for field, piece in sent.items():
            assert str(message.get(field) or "").startswith(piece), (text, sent, message)
            early += len(piece)
    assert early > 300 or (form == "llama" and tools)


def paused(text: str) -> Policy:
    policy = Policy("thinking", lambda _: text)
    policy.pause = asyncio.Event()
    return policy


ANSWER = "<think>I add one and two, which is quickly done.</think>The sum of one and two is three, I think." + CALL


def test_a_chat_client_reads_an_answer_while_it_is_generated(play):
    policy = paused(ANSWER)

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: Any = {"model": "any", "messages": USER, "tools": [TOOL], "logprobs": True}
            found = {"reasoning_content": "", "content": ""}
            calls, early = [], ""
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                (choice,) = chunk.choices
                for field in ("reasoning_content", "content"):
                    found[field] += getattr(choice.delta, field, None) or ""
                calls += choice.delta.tool_calls or []
                if not policy.pause.is_set() and found["reasoning_content"]:
                    early = found["reasoning_content"]
                    policy.pause.set()
            assert "I add one and two, which is quickly done.".startswith(early)
            assert early
            assert found["reasoning_content"] == "I add one and two, which is quickly done."
            assert found["content"] == "The sum of one and two is three, I think."
            assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1}]
            assert choice.finish_reason == "tool_calls"
            assert [token.logprob for token in choice.logprobs.content] == policy.said[0][1].logprobs
        return 1

    play(policy, agent)


def test_a_responses_client_reads_an_answer_while_it_is_generated(play):
    policy = paused(ANSWER)

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: Any = {
                "model": "any",
                "input": "?",
                "tools": [{"type": "function", **TOOL["function"], "strict": False}],
            }
            kinds = []
            async with client.responses.stream(**asked) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    if event.type == "response.reasoning_text.delta":
                        policy.pause.set()
                final = await stream.get_final_response()
            thought, message, call = final.output
            assert thought.content[0].text == "I add one and two, which is quickly done."
            assert message.content[0].text == final.output_text == "The sum of one and two is three, I think."
            assert json.loads(call.arguments) == {"a": 1}
            assert kinds.count("response.output_text.delta") > 1
            assert [kinds.count(f"response.output_item.{end}") for end in ("added", "done")] == [3, 3]
        return 1

    play(policy, agent)


def test_an_anthropic_client_reads_an_answer_while_it_is_generated(play):
    policy = paused(ANSWER)

    async def agent(base_url: str, api_key: str) -> float:
        async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            tool = {"name": "add", "description": "", "input_schema": {"type": "object"}}
            kinds = []
            async with client.messages.stream(model="any", max_tokens=500, messages=USER, tools=[tool]) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    if event.type == "thinking":
                        policy.pause.set()
                final = await stream.get_final_message()
            thinking, text, use = final.content
            assert thinking.thinking == "I add one and two, which is quickly done."
            assert text.text == "The sum of one and two is three, I think."
            assert use.input == {"a": 1}
            assert kinds.count("text") > 1
        return 1

    play(policy, agent)


@pytest.mark.parametrize("text", ["", CALL])
def test_an_answer_without_text_is_streamed_as_it_would_be_sent(play, text):
    policy = Policy("chat", lambda _: text)

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            tool = {"type": "function", **TOOL["function"], "strict": False}
            async with client.responses.stream(model="any", input="?", tools=[tool]) as stream:
                streamed = await stream.get_final_response()
            sent = await client.responses.create(model="any", input="?", tools=[tool])
            assert [item.type for item in streamed.output] == [item.type for item in sent.output]
        async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            tool = {"name": "add", "description": "", "input_schema": {"type": "object"}}
            asked: Any = {"model": "any", "max_tokens": 500, "messages": USER, "tools": [tool]}
            async with client.messages.stream(**asked) as stream:
                begun = await stream.get_final_message()
            assert [block.type for block in begun.content] == [
                b.type for b in (await client.messages.create(**asked)).content
            ]
        return 1

    play(policy, agent)


THOUGHTS = "<think>one</think>"


@pytest.mark.parametrize("text", [f"{THOUGHTS}a{CALL}", f"{THOUGHTS}a{THOUGHTS}b{CALL}", f"{THOUGHTS}a{CALL}b{CALL}"])
def test_calls_are_streamed_wherever_they_stand(play, text):
    policy = Policy("thinking", lambda _: text)
    calls = text.count(CALL)

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            tool = {"type": "function", **TOOL["function"], "strict": False}
            async with client.responses.stream(model="any", input="?", tools=[tool]) as stream:
                names = [
                    e.item.name async for e in stream if e.type == "response.output_item.done" and "call" in e.item.type
                ]
            assert names == ["add"] * calls
        async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            tool = {"name": "add", "description": "", "input_schema": {"type": "object"}}
            async with client.messages.stream(model="any", max_tokens=500, messages=USER, tools=[tool]) as stream:
                content = (await stream.get_final_message()).content
            assert [block.input for block in content if block.type == "tool_use"] == [{"a": 1}] * calls
        return 1

    play(policy, agent)


def read_to_the_end(port: int, api_key: str) -> None:
    """Send one request as curl does, and close the connection at its last line."""
    body = json.dumps({"messages": USER, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {api_key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not an orderly end


def test_clients_that_close_at_the_last_line_keep_their_answers(play):
    """The event loop has other work, so that it sees the end of the connection before the handler could go on."""
    policy = Policy("chat", lambda _: "three words only")

    async def agent(base_url: str, api_key: str) -> float:
        async def work() -> None:
            while True:
                time.sleep(0.002)
                await asyncio.sleep(0)

        busy = asyncio.ensure_future(work())
        for _ in range(20):
            await asyncio.to_thread(read_to_the_end, urlsplit(base_url).port, api_key)
        busy.cancel()
        return 1

    metrics = play(policy, agent).metrics
    assert (metrics["agents/turns"], metrics["agents/lost_answers"]) == (20, 0)


def agent_that_reads_the_error(message: str, *, asks_again: bool = False) -> Any:
    """Return an agent whose stream ends with an error, after which it may ask for a whole answer."""

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            with pytest.raises(openai.APIError, match=message):
                async for _ in await client.chat.completions.create(model="any", messages=USER, stream=True):
                    pass
            if asks_again:
                await client.chat.completions.create(model="any", messages=USER)
        return 1

    return agent


def test_an_answer_whose_stream_ends_with_an_error_is_not_trained_on(play, monkeypatch):
    """The text that was sent does not begin the complete message: a fault of ours, which nothing else shows."""
    policy = Policy("chat", lambda _: "an answer")

    monkeypatch.setattr(GrowingText, "add", lambda *_: [("content", "another text")])
    metrics = play(policy, agent_that_reads_the_error("reads differently now", asks_again=True)).metrics
    assert (metrics["agents/turns"], metrics["agents/lost_answers"]) == (1, 1)


def test_a_request_that_fails_in_the_middle_ends_its_stream_with_an_error(play, monkeypatch):
    policy = Policy("chat", lambda _: "a long answer that will never come to its end")
    whole = policy.generate

    async def failing(*arguments: Any, **settings: Any) -> Any:
        answer = await whole(*arguments, **settings)
        if len(policy.said) == 1:
            raise ValueError("a server failed after the caller had received its tokens, which cannot be kept")
        return answer

    agent = agent_that_reads_the_error("a server failed after the caller had received its tokens", asks_again=True)
    monkeypatch.setattr(policy, "generate", failing)
    assert play(policy, agent).metrics["agents/turns"] == 1


def test_a_client_that_goes_away_between_two_pieces_loses_its_answer(play):
    policy = paused("a long answer of which the client reads only the beginning")

    async def agent(base_url: str, api_key: str) -> float:
        body = {"messages": USER, "stream": True}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client,
            client.post(f"{base_url}/chat/completions", json=body) as response,
        ):
            async for line in response.content:
                if b'"content": "a' in line:
                    break
        policy.pause = None
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model="any", messages=USER)
        return 1

    metrics = play(policy, agent).metrics
    assert (metrics["agents/turns"], metrics["agents/lost_answers"]) == (1, 1)


def test_the_end_of_the_run_in_the_middle_of_a_stream_is_an_error_event(play, monkeypatch):
    policy = Policy("chat", lambda _: "some text of an answer")
    whole = policy.generate

    async def ends(*arguments: Any, **settings: Any) -> Any:
        await whole(*arguments, **settings)
        raise RunError("all servers are gone")

    monkeypatch.setattr(policy, "generate", ends)
    with pytest.raises(RunError, match="all servers are gone"):
        play(policy, agent_that_reads_the_error("the run has ended: all servers are gone"))
