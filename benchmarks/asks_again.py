"""The agent of `server_faults.py --agent` and `prefill_again.py`: weights or a kill may come between its turns."""

from __future__ import annotations

from typing import Any

import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, object]:
    """Ask for a sum, and for the same once more behind what was said."""
    return await ask(prompt, answer, base_url, api_key, turns=2)


async def solve_in_four(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, object]:
    """The same, asked four times."""
    return await ask(prompt, answer, base_url, api_key, turns=4)


async def ask(prompt: str, answer: str, base_url: str, api_key: str, turns: int) -> dict[str, object]:
    """A conversation whose every turn brings all that was said before."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = []
    right = []
    for _ in range(turns):
        messages.append({"role": "user", "content": prompt})
        done = await policy.chat.completions.create(model="policy", messages=messages)
        said = done.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        right.append(float(said.rpartition("}")[2].strip() == answer))
    return {"reward": sum(right) / turns, "rewards": {"first": right[0], "last": right[-1]}}
