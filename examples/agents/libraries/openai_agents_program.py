"""openai-agents: a function tool and a hand-over to another agent; by responses in pieces, then by chat completions."""

import asyncio
import contextlib
import json
import sys

import openai
from agents import Agent, AgentsException, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(question: str) -> str:
    adder = Agent(name="adder", instructions="You add numbers.", tools=[add], model="policy")
    porter = Agent(name="porter", instructions="Hand sums over.", handoffs=[adder], model="policy")
    streamed = Runner.run_streamed(porter, question, max_turns=5)
    with contextlib.suppress(AgentsException):  # such as an answer that is cut, or a tool that there is not
        async for _ in streamed.stream_events():
            pass
    chat = OpenAIChatCompletionsModel("policy", openai.AsyncOpenAI())
    alone = Agent(name="adder", instructions="You add numbers.", tools=[add], model=chat)
    try:
        return str((await Runner.run(alone, question, max_turns=5)).final_output)
    except AgentsException:
        return ""


row = json.loads(sys.stdin.readline())
print(json.dumps({"answer": asyncio.run(main(f"What is {row['prompt']}"))}))
