"""smolagents' ToolCallingAgent with one tool."""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


row = json.loads(sys.stdin.readline())
agent = ToolCallingAgent([add], OpenAIModel("policy"), max_steps=3, verbosity_level=LogLevel.OFF)
print(json.dumps({"answer": str(agent.run(f"What is {row['prompt']}"))}))
