"""The official SDKs, unchanged, against the endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from policies import Policy

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.0, "x"]}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
FLAT = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": False}
ANTHROPIC = {"name": "add", "description": "adds", "input_schema": PARAMETERS}


def asked(episode: Any) -> dict[str, float]:
    """Requests by protocol, and those whose answer came in pieces."""
    counts = {name.removeprefix("agents/"): value for name, value in episode.metrics.items() if "_requests" in name}
    return {name: value for name, value in counts.items() if value}


def says(*texts: str) -> Any:
    return lambda number: texts[min(number, len(texts) - 1)]


def test_a_chat_with_a_tool_is_one_trajectory_of_the_sampled_tokens(play):
    policy = Policy("chat", says(f"I add. {CALL}", "It is 3."))

    async def agent(base_url: str, api_key: str, model: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]
            asked: Any = {"model": model, "tools": [TOOL], "temperature": 0, "logprobs": True}
            first = await client.chat.completions.create(messages=messages, **asked)
            (choice,) = first.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "I add."
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1, "b": [2.0, "x"]}
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await client.chat.completions.create(messages=messages, **asked)
            assert second.choices[0].message.content == "It is 3."
            assert second.choices[0].finish_reason == "stop"
            assert second.usage.completion_tokens == len(policy.said[1][1].output_ids)
            assert [t.logprob for t in second.choices[0].logprobs.content] == policy.said[1][1].logprobs
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
        return 0.5

    episode = play(policy, agent)
    (trajectory,) = episode.trajectories
    tokens = trajectory.tokens
    (prompt, first), (again, second) = policy.said
    assert again[: len(prompt) + len(first.output_ids)] == [*prompt, *first.output_ids]
    assert tokens["input_ids"].tolist() == [*again, *second.output_ids]
    assert tokens["input_ids"][tokens["loss_mask"]].tolist() == [*first.output_ids, *second.output_ids]
    assert episode.reward == 0.5
    counted = {
        name: episode.metrics[f"agents/{name}"] for name in ("turns", "calls", "conversations", "other_sampling")
    }
    assert counted == {"turns": 2, "calls": 1, "conversations": 1, "other_sampling": 2}
    assert asked(episode) == {"chat_requests": 2}


@pytest.mark.parametrize("has_stream", [False, True])
def test_responses_follow_one_another_by_identifier_and_by_items(play, has_stream):
    policy = Policy("thinking", says(f"<think>\nhm\n</think>\n\n{CALL}", "3, then.", "Yes."))

    async def respond(client: Any, **asked: Any) -> Any:
        if not has_stream:
            return await client.responses.create(model="any", **asked)
        async with client.responses.stream(model="any", **asked) as stream:
            kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            return await stream.get_final_response()

    async def agent(base_url: str, api_key: str) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            opening: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            first = await respond(client, input=opening, instructions="Be brief.", tools=[FLAT])
            thought, call = first.output
            assert thought.content[0].text == "hm"
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": [2.0, "x"]})
            told = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            items = [*opening, *(item.model_dump(exclude_none=True) for item in first.output), told]
            second = await respond(client, input=items, instructions="Be brief.", tools=[FLAT])
            assert second.output_text == "3, then."
            other = await respond(client, input=[told], previous_response_id=first.id, tools=[FLAT])
            assert other.output_text == "Yes."

    episode = play(policy, agent)
    (_, first), (prompt, _), (again, last) = policy.said
    assert prompt == again, "by items or by identifier, the tokens are the same"
    _, trajectory = episode.trajectories  # one for each of two requests, and what they share is learned from once
    tokens = trajectory.tokens
    assert tokens["input_ids"].tolist() == [*again, *last.output_ids]
    assert tokens["input_ids"][tokens["loss_mask"]].tolist() == last.output_ids
    assert int(episode.trajectories[0].tokens["loss_mask"].sum()) > len(first.output_ids)
    assert policy.scored[0]["completion"] == "Yes."
    assert episode.reward == 1.0
    assert asked(episode) == {"responses_requests": 3, **({"streamed_requests": 3} if has_stream else {})}


def test_other_instructions_take_the_place_of_those_that_a_conversation_began_with(play):
    policy = Policy("chat", says("yes"))

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            first = await client.responses.create(model="any", input="?", instructions="Be brief.")
            for instructions in ("Be brief.", "Be loud.", openai.NOT_GIVEN):
                await client.responses.create(
                    model="any", input="!", previous_response_id=first.id, instructions=instructions
                )
        return 1

    play(policy, agent)
    _, same, other, none = (policy.tokenizer.decode(prompt) for prompt, _ in policy.said)
    assert same == none
    assert other == same.replace("Be brief.", "Be loud.")
    (first, said), (again, _) = policy.said[:2]
    assert again[: len(first) + len(said.output_ids)] == [*first, *said.output_ids], "the same ones continue"


@pytest.mark.parametrize("has_stream", [False, True])
def test_anthropics_messages_with_a_tool(play, has_stream):
    policy = Policy("thinking", says(f"<think>\nhm\n</think>\n\nI add.{CALL}", "3."))

    async def agent(endpoint: Any) -> float:
        url = endpoint.as_environment()["ANTHROPIC_BASE_URL"]
        async with anthropic.AsyncAnthropic(base_url=url, api_key=endpoint.api_key) as client:
            asked: Any = {"model": "any", "max_tokens": 500, "system": "Be brief.", "tools": [ANTHROPIC]}

            async def ask(messages: Any) -> Any:
                if not has_stream:
                    return await client.messages.create(messages=messages, **asked)
                async with client.messages.stream(messages=messages, **asked) as stream:
                    return await stream.get_final_message()

            messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            counted = await client.messages.count_tokens(
                messages=messages, model="any", system="Be brief.", tools=[ANTHROPIC]
            )
            first = await ask(messages)
            assert counted.input_tokens == first.usage.input_tokens == len(policy.said[0][0])
            thought, text, use = first.content
            assert (thought.thinking, text.text, use.input) == ("hm", "I add.", {"a": 1, "b": [2.0, "x"]})
            assert first.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await ask(messages)
            assert second.content[0].text == "3."
            assert second.stop_reason == "end_turn"
        return 1

    episode = play(policy, agent)
    (trajectory,) = episode.trajectories
    (_, first), (again, second) = policy.said
    assert trajectory.tokens["input_ids"].tolist() == [*again, *second.output_ids]
    assert int(trajectory.tokens["loss_mask"].sum()) == len(first.output_ids) + len(second.output_ids)
    assert asked(episode) == {"messages_requests": 2, **({"streamed_requests": 2} if has_stream else {})}


def test_a_stream_of_a_chat_is_the_same_answer_in_pieces(play):
    policy = Policy("chat", says(f"I add.{CALL}"))

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            stream = await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "?"}], tools=[TOOL], stream=True,
                stream_options={"include_usage": True}, n=2,
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        for number in (0, 1):
            pieces = [choice for choice in choices if choice.index == number]
            assert "".join(piece.delta.content or "" for piece in pieces) == "I add."
            assert [call.function.name for piece in pieces for call in piece.delta.tool_calls or ()] == ["add"]
            assert pieces[-1].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens == sum(len(said.output_ids) for _, said in policy.said)
        return 0

    episode = play(policy, agent)
    assert len(episode.trajectories) == 2, "nobody knows which of two choices the reward is for"


def test_a_key_is_worth_nothing_in_another_episode_or_after_its_own(play):
    policy = Policy("chat", says("yes"))
    known: dict[str, Any] = {}

    async def agent(base_url: str, api_key: str) -> float:
        with pytest.raises(openai.AuthenticationError, match="belongs to no episode"):
            await openai.AsyncOpenAI(base_url=base_url, api_key="sk-areal-x", max_retries=0).models.list()
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            if known:
                old = openai.AsyncOpenAI(base_url=base_url, api_key=known["key"], max_retries=0)
                with pytest.raises(openai.AuthenticationError, match=r"has ended|belongs to no episode"):
                    await old.models.list()
            answer = await client.responses.create(model="any", input="?")
            if known:
                with pytest.raises(openai.NotFoundError, match="no answer"):
                    await client.responses.create(model="any", input="?", previous_response_id=known["answer"])
            known.update(key=api_key, answer=answer.id)
        return 1

    play(policy, agent)
    play(policy, agent)
