"""Two parts of one policy in an episode: a planner, and a solver that sees its plan and not the planner's talk.

`solve` is the agent: two conversations, each with a system prompt of its own. The models that it asks for are the names
of the agents, so that planners are compared with planners and solvers with solvers.
"""

from __future__ import annotations

import random
from typing import Any

import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, Any]:
    """Let the one plan and the other solve."""
    policy = client.with_options(base_url=base_url, api_key=api_key)

    async def ask(agent_id: str, task: str, message: str) -> str:
        messages: Any = [{"role": "system", "content": task}, {"role": "user", "content": message}]
        done = await policy.chat.completions.create(model=agent_id, messages=messages)
        return (done.choices[0].message.content or "").strip()

    plan = await ask("planner", "you plan", prompt)
    said = await ask("solver", "you solve", f"{prompt} {plan}")
    return {"reward": float(said == answer), "rewards": {"planned": float("=" in plan)}}


def plan_of(a: int, b: int) -> str:
    """Units before tens."""
    units = a % 10 + b % 10
    carry = f"+{units // 10}" if units > 9 else ""
    return f"{a % 10}+{b % 10}={units};{a // 10}+{b // 10}{carry}={a // 10 + b // 10 + units // 10}"


class Sums:
    """Rows `{"prompt": "47+38", "answer": "85"}`; 200 of the 8,100 are held out."""

    def __init__(self, split: str = "train") -> None:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(1).shuffle(pairs)
        self.pairs = pairs[:200] if split == "held_out" else pairs[200:]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self.pairs[index]
        return {"prompt": f"{a}+{b}", "answer": str(a + b)}


class Lessons(Sums):
    """Both in turn: the solver is taught with plans and without, the planner to say mostly "just do it"."""

    def __len__(self) -> int:
        return 64 * 800

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(index)
        a, b = draw.choice(self.pairs)
        share = 1.0 if index * 2 < len(self) else 0.15
        plan = plan_of(a, b) if draw.random() < share else "just do it"
        if index % 2:
            task, told, said = "you plan", f"{a}+{b}", plan
        else:
            plan = plan_of(a, b) if draw.random() < 0.7 else "just do it"
            # Without a plan it guesses.
            said = str(a + b if "=" in plan else a + b + draw.randint(-5, 5))
            task, told = "you solve", f"{a}+{b} {plan}"
        asked = [{"role": "system", "content": task}, {"role": "user", "content": told}]
        return {"messages": [*asked, {"role": "assistant", "content": said}]}
