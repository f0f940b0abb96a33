"""A coder: the policy writes a function, unit tests in a sandbox judge it. Its tasks, and a small model's lessons.

`write` is the agent; what it returns is a text, which the run's reward takes for the code.
"""

from __future__ import annotations

import random
from typing import Any

import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


async def write(prompt: str, base_url: str, api_key: str) -> str:
    """Ask for the code."""
    policy = client.with_options(base_url=base_url, api_key=api_key)
    done = await policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    return done.choices[0].message.content or ""


class Tasks:
    """Rows such as `{"prompt": "add 3, times 2", "tests": ["assert f(4) == 14", ...]}`; every fifth is held out."""

    def __init__(self, split: str = "train") -> None:
        numbers = range(2, 10)
        tasks = [(word, a, b) for word in ("add", "less") for a in numbers for b in numbers]
        random.Random(1).shuffle(tasks)
        self.tasks = [task for place, task in enumerate(tasks) if (place % 5 == 0) == (split == "held_out")]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        word, a, b = self.tasks[index]
        sign = {"add": 1, "less": -1}[word]
        tests = [f"assert f({x}) == {(x + sign * a) * b}" for x in (0, 1, 7)]
        return {"prompt": f"{word} {a}, times {b}", "tests": tests}


class Lessons(Tasks):
    """Pairs of a task and its code, which nine times of ten forgets the parentheses."""

    def __len__(self) -> int:
        return 64 * 300

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        word, a, b = draw.choice(self.tasks)
        done = f"x{'+' if word == 'add' else '-'}{a}"
        code = f"def f(x): return {done}*{b}" if draw.random() < 0.9 else f"def f(x): return ({done})*{b}"
        asked = {"role": "user", "content": f"{word} {a}, times {b}"}
        return {"messages": [asked, {"role": "assistant", "content": code}]}
