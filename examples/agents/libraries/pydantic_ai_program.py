"""pydantic-ai with one tool: by responses, then by chat completions in pieces."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(question: str) -> str:
    await Agent("openai:policy", instructions="You add numbers.", tools=[add]).run(question)
    chat = Agent(OpenAIChatModel("policy"), instructions="You add numbers.", tools=[add])
    async with chat.run_stream(question) as streamed:
        return str(await streamed.get_output())


row = json.loads(sys.stdin.readline())
print(json.dumps({"answer": asyncio.run(main(f"What is {row['prompt']}"))}))
