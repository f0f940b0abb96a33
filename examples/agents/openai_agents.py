"""An agent on openai-agents with a function tool, as its documentation shows one.

The library is in the environment that areal runs in: `pip install openai-agents`. Where it does not resolve beside
areal, the programs of `libraries` show it in an environment of its own.
"""

from __future__ import annotations

from typing import Any

import openai
from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none yet")


@function_tool
def multiply(a: str, b: str) -> str:
    """Multiply two whole numbers."""
    return str(int(a) * int(b)) if a.isdigit() and b.isdigit() else "wrong"


async def solve(prompt: str, answer: str, base_url: str, api_key: str) -> dict[str, Any]:
    """Run the agent, and hold its last word against the answer."""
    policy = OpenAIChatCompletionsModel("policy", client.with_options(base_url=base_url, api_key=api_key))
    try:
        done = await Runner.run(Agent(name="multiplier", tools=[multiply], model=policy), prompt, max_turns=3)
    except AgentsException:  # it goes on for too long, or calls a tool that there is not
        return {"reward": 0.0}
    return {"reward": float(str(done.final_output).strip() == answer)}
