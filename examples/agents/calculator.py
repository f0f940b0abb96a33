"""An agent that may call a calculator; the products that it is asked for; the lessons that a small model begins with.

`solve` is the agent, on OpenAI's SDK, and the only part that a real model needs.
"""

from __future__ import annotations

import json
import random
from typing import Any

import openai

OPEN, CLOSE = '<tool_call>{"name": "multiply", "arguments": {"a": "', '"}}</tool_call>'
BETWEEN = '", "b": "'
NUMBERS = {name: {"type": "string"} for name in ("a", "b")}
FUNCTION = {"name": "multiply", "description": "a * b", "parameters": {"type": "object", "properties": NUMBERS}}
TOOL: Any = {"type": "function", "function": FUNCTION}
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


def multiply(a: str, b: str) -> str:
    """The tool; what is wrong with its arguments is told."""
    return str(int(a) * int(b)) if a.isdigit() and b.isdigit() else "wrong"


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask until no tool is called, and hold the last word against the answer."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(3):
        done = await policy.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = done.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            given = json.loads(call.function.arguments)
            result = multiply(str(given.get("a")), str(given.get("b")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return {"reward": float((message.content or "").strip() == answer)}


class Problems:
    """Rows `{"prompt": "47*38=", "answer": "1786"}`; 200 of the 8,100 are held out."""

    def __init__(self, split: str = "train") -> None:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(1).shuffle(pairs)
        self.pairs = pairs[:200] if split == "held_out" else pairs[200:]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self.pairs[index]
        return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


class Lessons(Problems):
    """Conversations: the first half calls the tool, of the second a tenth; the others answer at once."""

    def __len__(self) -> int:
        return 64 * 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        a, b = draw.choice(self.pairs)
        asked, said = {"role": "user", "content": f"{a}*{b}="}, {"role": "assistant", "content": str(a * b)}
        if index * 2 > len(self) and draw.random() > 0.1:
            return {"messages": [asked, said], "tools": [TOOL]}
        call = {"role": "assistant", "content": f"{OPEN}{a}{BETWEEN}{b}{CLOSE}"}
        return {"messages": [asked, call, {"role": "tool", "content": said["content"]}, said], "tools": [TOOL]}
