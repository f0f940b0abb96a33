"""smolagents' CodeAgent: the policy writes Python, which calls a tool; its answers come in pieces."""

import json
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


row = json.loads(sys.stdin.readline())
agent = CodeAgent([add], OpenAIModel("policy"), max_steps=3, verbosity_level=LogLevel.OFF, stream_outputs=True)
print(json.dumps({"answer": str(agent.run(f"What is {row['prompt']}"))}))
