"""What the endpoint refuses, loses, counts and says."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import aiohttp
import pytest
from policies import Policy

from areal_agents import endpoint

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "?"}]


def ask(base_url: str, api_key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **options)


def test_an_answer_that_its_client_did_not_wait_for_is_not_trained_on(play):
    policy = Policy("chat", lambda number: f"answer {number}")
    policy.wait_s = 20.0

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key, max_retries=0) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="any", messages=USER, timeout=0.5)
            policy.wait_s = 0.0
            await client.chat.completions.create(model="any", messages=USER)
        return 1

    episode = play(policy, agent)
    (trajectory,) = episode.trajectories
    assert "answer 1" in policy.tokenizer.decode(trajectory.tokens["input_ids"])
    assert policy.said[0][0] == [], "what nobody waits for is not generated to its end"
    assert episode.metrics["agents/turns"] == 1


def test_a_fault_of_the_endpoint_has_the_form_of_the_protocol(play, monkeypatch):
    def broken(*_: Any) -> Any:
        raise KeyError("logits")

    monkeypatch.setattr(endpoint.openai_chat, "write", broken)

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="the endpoint failed: KeyError") as failed:
                await client.chat.completions.create(model="any", messages=USER)
        assert failed.value.code == "internal_error"
        monkeypatch.undo()
        async with ask(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=USER)
        return 1

    assert play(Policy("chat", lambda _: "yes"), agent).metrics["agents/lost_answers"] == 1


def test_a_client_that_goes_away_in_a_stream_loses_its_answer(play):
    policy = Policy("chat", lambda number: f"answer {number}")

    async def agent(base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        policy.wait_s = 2.0
        async with aiohttp.ClientSession(headers=headers) as client:
            body, soon = {"messages": USER, "stream": True}, aiohttp.ClientTimeout(total=0.5)
            with pytest.raises(asyncio.TimeoutError):
                await (await client.post(f"{base_url}/chat/completions", json=body, timeout=soon)).read()
        policy.wait_s = 0.0
        async with ask(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=USER)
        return 1

    metrics = play(policy, agent).metrics
    assert (metrics["agents/turns"], metrics["agents/lost_answers"]) == (1, 1)


def test_what_is_not_served_is_refused_in_the_form_of_the_protocol(play):
    policy = Policy("chat", lambda _: "yes")
    large: Any = [{"role": "user", "content": "?" * 60_000_000}]

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key, max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="the endpoint serves /v1/chat/completions, ") as lost:
                await client.embeddings.create(model="any", input="?")
            assert lost.value.code == "not_found"
            assert "POST /v1/embeddings: 404" in str(lost.value)
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(model="any", messages=large)
            assert (refused.value.status_code, refused.value.code) == (413, "request_entity_too_large")
            assert f"Maximum request body size {endpoint.LARGEST_BODY} exceeded" in refused.value.message
            with pytest.raises(openai.APIStatusError) as wrong:
                await client.get("/chat/completions", cast_to=object)
            assert (wrong.value.status_code, wrong.value.code) == (405, "method_not_allowed")
        url = base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0) as other:
            for status, kind, asking in (
                (413, "request_too_large", other.messages.create(model="any", max_tokens=9, messages=large)),
                (404, "not_found_error", other.messages.batches.retrieve("1")),
                (405, "invalid_request_error", other.get("/v1/messages", cast_to=object)),
            ):
                with pytest.raises(anthropic.APIStatusError) as told:
                    await asking
                assert told.value.status_code == status
                body: Any = told.value.body
                assert (body["type"], body["error"]["type"]) == ("error", kind)
            await other.messages.create(model="any", max_tokens=9, messages=USER)
        return 1

    play(policy, agent)


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_a_long_prompt_holds_up_nobody_else(play, path, monkeypatch):
    """It is read, and its tokens are looked for, beside the event loop: else this ends at the deadline of a wait."""
    policy, answered, was_free = Policy("chat", lambda _: "yes"), threading.Event(), []
    plain, read = policy.tokenizer.apply_chat_template, endpoint.read_json

    def slowly(messages: Any, **options: Any) -> Any:
        if len(messages[0]["content"]) > 1000:
            was_free.append(answered.wait(5))
        return plain(messages, **options)

    def read_slowly(text: str) -> Any:
        if len(text) > 1000:
            was_free.append(answered.wait(5))
        return read(text)

    monkeypatch.setattr(policy.tokenizer, "apply_chat_template", slowly)
    monkeypatch.setattr(endpoint, "read_json", read_slowly)

    async def agent(base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            body = {"messages": [{"role": "user", "content": "word " * 200_000}]}
            asking = asyncio.ensure_future(client.post(f"{base_url}/{path}", json=body))
            await asyncio.sleep(0.2)
            async with client.get(f"{base_url}/models") as found:
                assert found.status == 200
            answered.set()
            async with await asking as response:
                assert response.status in (200, 400)
            async with client.post(f"{base_url}/chat/completions", json={"messages": USER}) as response:
                assert response.status == 200
        return 1

    play(policy, agent)
    assert len(was_free) > 1
    assert all(was_free)


def test_hosted_tools_of_responses_and_messages_are_refused(play):
    policy = Policy("chat", lambda _: "yes")

    async def agent(endpoint: Any) -> float:
        async with ask(endpoint.base_url, endpoint.api_key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="a hosted tool of type 'web_search' is not served"):
                await client.responses.create(model="any", input="?", tools=[{"type": "web_search"}])
            await client.responses.create(model="any", input="?")
        url = endpoint.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=endpoint.api_key, max_retries=0) as other:
            tool: Any = {"type": "web_search_20250305", "name": "web_search"}
            with pytest.raises(anthropic.BadRequestError, match="a hosted tool of type 'web_search_20250305'"):
                await other.messages.create(model="any", max_tokens=9, messages=USER, tools=[tool])
        return 1

    play(policy, agent)


@pytest.mark.parametrize("setting", ["override", "refuse"])
def test_sampling_of_the_clients_own_is_counted_or_refused(play, setting, caplog):
    policy = Policy("chat", lambda _: "yes")

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key, max_retries=0) as client:
            asked: Any = {"model": "any", "messages": USER, "temperature": 0.2, "seed": 1}
            if setting == "refuse":
                with pytest.raises(openai.BadRequestError, match="does not honor seed, temperature: sampling"):
                    await client.chat.completions.create(**asked)
                await client.chat.completions.create(model="any", messages=USER)
                return 1
            for _ in range(2):
                await client.chat.completions.create(**asked)
        return 1

    episode = play(policy, agent, other_sampling=setting)
    counted = {name: value for name, value in episode.metrics.items() if "other_sampling" in name and value}
    names = "agents/other_sampling", "agents/other_sampling/seed", "agents/other_sampling/temperature"
    assert counted == (dict.fromkeys(names, 2) if setting == "override" else {})
    told = [record.message for record in caplog.records if "agents ask for" in record.message]
    assert len(told) == (setting == "override"), "it is said once"


def test_token_ids_go_in_and_come_out_and_continue(play):
    policy = Policy("chat", lambda number: f"answer {number}")
    prompt = policy.tokenizer.encode("begin")

    async def agent(base_url: str, api_key: str) -> float:
        url = base_url.removesuffix("/v1") + "/inference/v1/generate"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:

            async def generate(ids: list[int]) -> Any:
                body = {"token_ids": ids, "sampling_params": {"max_tokens": 50, "temperature": 1.0}}
                async with client.post(url, json=body) as response:
                    assert response.status == 200, await response.text()
                    return (await response.json())["choices"][0]

            first = await generate(prompt)
            ids = [*prompt, *first["token_ids"], *policy.tokenizer.encode(" and then?")]
            second = await generate(ids)
            told = second["logprobs"]["content"]
            assert [each["logprob"] for each in told] == policy.said[1][1].logprobs
            assert [each["token"] for each in told] == [f"token_id:{token}" for token in second["token_ids"]]
        return 1

    (trajectory,) = play(policy, agent).trajectories
    assert trajectory.tokens["input_ids"].tolist() == [*policy.said[1][0], *policy.said[1][1].output_ids]
    assert trajectory.turns["turn_rewards"].tolist() == [0.0, 0.0]


def test_a_stop_text_ends_the_answer_and_the_next_turn_goes_on_behind_it(play):
    policy = Policy("chat", lambda number: "look\nObservation: I made this up" if not number else "done")

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key) as client:
            first = await client.chat.completions.create(model="any", messages=USER, stop=["Observation:"])
            said = first.choices[0].message
            assert said.content == "look"
            follow = [*USER, said, {"role": "user", "content": "Observation: 4"}]
            await client.chat.completions.create(model="any", messages=follow)
        return 1

    (trajectory,) = play(policy, agent).trajectories
    text = policy.tokenizer.decode(trajectory.tokens["input_ids"])
    assert "look\nObservation:<|im_end|>\n<|im_start|>user\nObservation: 4<|im_end|>" in text


def test_equal_answers_that_cannot_be_told_apart_begin_a_new_conversation(play):
    policy = Policy("chat", lambda number: "same" if number < 2 else "other")

    async def agent(base_url: str, api_key: str) -> float:
        async with ask(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=USER, n=2)
            follow = [*USER, done.choices[0].message, *USER]
            await client.chat.completions.create(model="any", messages=follow)
        return 1

    episode = play(policy, agent)
    assert episode.metrics["agents/ambiguous_prefixes"] == 1
    assert len(episode.trajectories) == 3


def test_of_choices_the_one_that_is_continued_is_trained_and_each_has_a_name(play):
    policy = Policy("chat", lambda number: f"answer {number}")

    async def agent(base_url: str, api_key: str) -> Any:
        async with ask(base_url, api_key) as client:
            done = await client.chat.completions.create(model="any", messages=USER, n=3)
            follow = [*USER, done.choices[1].message, *USER]
            await client.chat.completions.create(model="any", messages=follow)
        return {"turn_rewards": {f"{done.id}/1": 0.25}}

    episode = play(policy, agent)
    (trajectory,) = episode.trajectories
    assert "answer 1" in policy.tokenizer.decode(trajectory.tokens["input_ids"])
    assert trajectory.turns["turn_rewards"].tolist() == [0.25, 0.0]
    assert episode.reward == 0.25


def test_a_reward_for_an_answer_that_nobody_received_is_refused(play):
    policy = Policy("chat", lambda _: "yes")

    async def agent(base_url: str, api_key: str) -> Any:
        async with ask(base_url, api_key) as client:
            await client.chat.completions.create(model="any", messages=USER)
        return {"turn_rewards": {"nonsense": 5.0}}

    with pytest.raises(ValueError, match="turn_rewards names nonsense, which is not an answer"):
        play(policy, agent)


def test_a_foreign_token_beside_the_key_is_passed_over(play):
    policy = Policy("chat", lambda _: "yes")

    async def agent(base_url: str, api_key: str) -> float:
        headers = {"Authorization": "Bearer other", "x-api-key": api_key}
        body = {"messages": USER, "max_tokens": 9}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{base_url}/messages", json=body) as done,
        ):
            return float(done.status == 200)

    assert play(policy, agent).reward == 1.0


def test_many_turns_are_no_recursion(play):
    policy = Policy("chat", lambda _: "y")

    async def agent(base_url: str, api_key: str) -> float:
        messages: list[Any] = list(USER)
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
        ids = [70]
        async with aiohttp.ClientSession(headers=headers) as client:
            for _ in range(600):
                async with client.post(url, json={"token_ids": ids}) as response:
                    ids = [*ids, *(await response.json())["choices"][0]["token_ids"], 71]
        return float(len(messages))

    (trajectory,) = play(policy, agent, max_answers=1000, max_tokens=10_000).trajectories
    assert int(trajectory.tokens["turn_ids"].max()) == 599


@pytest.mark.parametrize(("trained", "conversations"), [("all", 3), ("last", 1), ("longest", 1)])
def test_which_conversations_are_trained_on_is_a_choice(play, trained, conversations):
    """One begins, two go on from it, and a third stands alone; what two share is learned once."""
    texts = ["a b c", "d e f g h i j k", "d", "q"]
    policy = Policy("chat", lambda number: texts[number])

    async def agent(base_url: str, api_key: str) -> Any:
        async with ask(base_url, api_key) as client:

            async def turn(messages: list[Any]) -> tuple[str, list[Any]]:
                done = await client.chat.completions.create(model="any", messages=messages)
                return done.id, [*messages, done.choices[0].message]

            first, history = await turn(USER)
            await turn([*history, {"role": "user", "content": "long?"}])
            second, _ = await turn([*history, {"role": "user", "content": "short?"}])
            await turn([{"role": "user", "content": "alone"}])
        return {"reward": 2.0, "turn_rewards": {first: 0.5, second: 1.5}, "rewards": {"style": 0.25}}

    episode = play(policy, agent, trained=trained)
    decoded = [policy.tokenizer.decode(t.tokens["input_ids"]) for t in episode.trajectories]
    assert len(decoded) == conversations
    assert (episode.reward, episode.rewards) == (2.0, {"style": 0.25})
    if trained == "last":
        assert "alone" in decoded[0]
    if trained == "longest":
        assert "long?" in decoded[0]
    if trained == "all":
        learned = sum(int(t.tokens["loss_mask"].sum()) for t in episode.trajectories)
        assert learned == sum(len(said.output_ids) for _, said in policy.said)
        assert sorted(v for t in episode.trajectories for v in t.turns["turn_rewards"].tolist()) == [0, 0, 0.5, 1.5]
