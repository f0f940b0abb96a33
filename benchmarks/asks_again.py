"""The agent of `prefill_again.py`: weights may come between its turns."""

from __future__ import annotations

from typing import Any

import openai

TURNS = 4
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


async def solve_in_four(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, object]:
    """Ask for the same sum in every turn, each of which brings all that was said before."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = []
    right = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": prompt})
        done = await policy.chat.completions.create(model="policy", messages=messages)
        said = done.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        right.append(float(said.rpartition("}")[2].strip() == answer))
    return {"reward": sum(right) / TURNS, "rewards": {"first": right[0], "last": right[-1]}}
