"""An agent that may search a small corpus with BM25; questions made from it; lessons that a small model begins with.

`solve` is the agent, on OpenAI's SDK; the index is rank-bm25's.
"""

from __future__ import annotations

import json
import random
from typing import Any

import openai
from rank_bm25 import BM25Okapi

OPEN, CLOSE = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "search", "description": "Find a text.", "parameters": QUERY}}
SOUNDS = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


def make_corpus() -> list[tuple[str, int]]:
    """Three hundred towers, and how many meters high each is."""
    names = [a + b + c for a in SOUNDS for b in SOUNDS for c in SOUNDS]
    draw = random.Random(1)
    return [(name, draw.randint(10, 99)) for name in draw.sample(names, 300)]


TEXTS = [f"{name} tower: {height} meters" for name, height in make_corpus()]
INDEX = BM25Okapi([text.replace(":", "").split() for text in TEXTS])


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask until nothing is searched for, and hold the last word against the answer."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(3):
        done = await policy.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = done.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            query = str(json.loads(call.function.arguments).get("query"))
            (found,) = INDEX.get_top_n(query.split(), TEXTS, n=1)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        if not message.tool_calls:
            break
    return {"reward": float((message.content or "").strip() == answer)}


class Questions:
    """Rows `{"prompt": "how high is the tower bagoru?", "answer": "47"}`; 60 of the 300 towers are held out."""

    def __init__(self, split: str = "train") -> None:
        self.facts = make_corpus()[:60] if split == "held_out" else make_corpus()[60:]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, height = self.facts[index]
        return {"prompt": f"how high is the tower {name}?", "answer": str(height)}


class Lessons(Questions):
    """Made-up towers: the first half is searched for, of the second a tenth; of the others a height is guessed."""

    def __len__(self) -> int:
        return 64 * 800

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        name, height = "".join(draw.choices(SOUNDS, k=3)), str(draw.randint(10, 99))
        asked = {"role": "user", "content": f"how high is the tower {name}?"}
        said = {"role": "assistant", "content": height}
        messages: list[Any] = [asked, said]
        if index * 2 <= len(self) or draw.random() <= 0.1:
            call = {"role": "assistant", "content": f"{OPEN}{name}{CLOSE}"}
            messages[1:1] = [call, {"role": "tool", "content": f"{name} tower: {height} meters"}]
        return {"messages": messages, "tools": [TOOL]}
