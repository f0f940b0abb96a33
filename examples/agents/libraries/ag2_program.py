"""ag2 with one tool; answers come in pieces."""

import asyncio
import json
import sys

from ag2 import Agent
from ag2.config import OpenAIConfig


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(question: str) -> str:
    agent = Agent("adder", "You add numbers.", config=OpenAIConfig("policy", streaming=True), tools=[add])
    return str(await (await agent.ask(question)).content())


row = json.loads(sys.stdin.readline())
print(json.dumps({"answer": asyncio.run(main(f"What is {row['prompt']}"))}))
