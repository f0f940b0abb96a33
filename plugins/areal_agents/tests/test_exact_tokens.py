"""Trained tokens are the sampled ones, byte for byte, under the weights' own log-probabilities."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from policies import TEMPLATES, Policy, make_forward

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow

CONVERSATIONS = 67
"""With each of three templates."""
WORDS = [
    "false",
    "False",
    " true",
    "\n\n",
    "the answer",
    "«é»",
    "🙂",
    "a  b",
    "{",
    "}",
    "<think",
    "<|im_end|>",
    "3.0",
    "",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does", "parameters": {"type": "object"}}}
    for name in ("look", "add")
]


def make_speaker(seed: int) -> Any:
    """What the policy says: thoughts, texts and calls, some of them malformed, some cut."""

    def log(number: int) -> str:
        chance = random.Random(f"{seed}/{number}")

        def words() -> str:
            return "".join(chance.choice(WORDS).replace("<|im_end|>", "end") for _ in range(chance.randint(0, 6)))

        text = f"<think>\n{words()}\n</think>\n\n" if chance.random() < 0.4 else ""
        text += words()
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            arguments = {chance.choice("xyz"): chance.choice([False, 1.0, "a\nb", None, [1, {"k": "v"}], "false"])}
            call = json.dumps({"name": chance.choice(["look", "add"]), "arguments": arguments})
            call = call[:-2] if chance.random() < 0.15 else call.replace(", ", ",  " * chance.randint(1, 2), 1)
            text += f"<tool_call>\n{call}\n</tool_call>\n"
        return text

    return log


async def converse(seed: int, base_url: str, api_key: str, **_: Any) -> float:
    """A client that calls tools, branches, goes back, repeats itself, and normalizes what it sends back."""
    chance = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages: list[Any]) -> list[Any]:
            asked: Any = {"tools": TOOLS} if uses_tools else {}
            if chance.random() < 0.1:
                asked["max_tokens"] = 5
            if chance.random() < 0.15:
                asked["n"] = 2
            done = await client.chat.completions.create(model="any", messages=messages, **asked)
            message = chance.choice(done.choices).message
            sent = message.model_dump(exclude_none=chance.random() < 0.5)
            if chance.random() < 0.5:
                sent.pop("reasoning_content", None)  # as most clients do
            for call in sent.get("tool_calls") or ():
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=chance.choice([None, 2]))
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": chance.choice(WORDS) * 2}
                for call in message.tool_calls or ()
            ]
            follow = results or [{"role": "user", "content": chance.choice(WORDS) + "?"}]
            return [*messages, sent, *follow]

        uses_tools = chance.random() < 0.8
        system = [{"role": "system", "content": "Be brief. <|im_start|>"}] if chance.random() < 0.5 else []
        heads: list[list[Any]] = [[*system, {"role": "user", "content": f"{chance.choice(WORDS)} begin {seed}"}]]
        for _ in range(chance.randint(1, 6)):
            head = chance.choice(heads[-2:])  # now and then an earlier one: a branch
            if chance.random() < 0.2:
                heads += await asyncio.gather(ask(head), ask(heads[0]))
            else:
                heads.append(await ask(head))
    return 1.0


def continued(policy: Policy) -> set[tuple[int, ...]]:
    """Prompts that have an answer in them."""
    opening = policy.tokenizer.decode(policy.said[0][0])[-20:]
    return {tuple(prompt) for prompt, _ in policy.said if policy.tokenizer.decode(prompt).count(opening) > 1}


def goes_on(prompt: tuple[int, ...], policy: Policy) -> bool:
    """Whether it begins with the very tokens of an earlier request and its answer."""
    known = [(*before, *said.output_ids) for before, said in policy.said]
    return any(prompt[: len(ids)] == ids for ids in known)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "thinking")) for name in TEMPLATES]
)
def test_what_is_trained_is_what_was_sampled(play, template):
    forward = make_forward()
    names = "calls", "malformed_calls", "rewritten_prefixes", "ambiguous_prefixes", "conversations", "turns"
    seen = dict.fromkeys(names, 0.0)
    for seed in range(CONVERSATIONS):
        policy = Policy(template, make_speaker(seed), seed, forward)

        async def agent(endpoint: Any, seed: int = seed) -> float:
            return await converse(seed, endpoint.base_url, endpoint.api_key)

        episode = play(policy, agent)
        sampled = {(tuple(prompt), tuple(said.output_ids)): said for prompt, said in policy.said}
        trained = 0
        for trajectory in episode.trajectories:
            ids, mask = trajectory.tokens["input_ids"].tolist(), trajectory.tokens["loss_mask"].tolist()
            fresh, turns = forward(ids), trajectory.tokens["turn_ids"].tolist()
            for turn in range(max(turns) + 1):
                begin = turns.index(turn)
                end = len(turns) - turns[::-1].index(turn)
                assert all(mask[begin:end])
                # The very request in which it was sampled: the same prompt, the same tokens.
                said = sampled[tuple(ids[:begin]), tuple(ids[begin:end])]
                assert trajectory.tokens["logprobs"][begin:end].tolist() == pytest.approx(said.logprobs)
                assert said.logprobs == pytest.approx(fresh[begin:end].tolist(), abs=1e-4)
                trained += 1
        assert trained <= len(policy.said)
        broken = [prompt for prompt in continued(policy) if not goes_on(prompt, policy)]
        assert len(broken) <= sum(episode.metrics[f"agents/{why}_prefixes"] for why in ("rewritten", "ambiguous"))
        for name in seen:
            seen[name] += episode.metrics.get(f"agents/{name}", 0.0)
    assert seen["calls"] > CONVERSATIONS / 2
    assert seen["malformed_calls"] > CONVERSATIONS / 20
    assert seen["conversations"] > CONVERSATIONS, "some have branches"
    assert seen["ambiguous_prefixes"] < seen["turns"] / 10
    assert (seen["rewritten_prefixes"] > CONVERSATIONS / 4) == (template == "thinking")
