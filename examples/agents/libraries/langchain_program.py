"""langchain-openai in an agent of langgraph with one tool; answers come in pieces."""

import json
import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


row = json.loads(sys.stdin.readline())
agent = create_react_agent(ChatOpenAI(model="policy", streaming=True), [add], prompt="You add numbers.")
question = {"messages": [{"role": "user", "content": f"What is {row['prompt']}"}]}
done = agent.invoke(question, {"recursion_limit": 12})
print(json.dumps({"answer": done["messages"][-1].text}))
