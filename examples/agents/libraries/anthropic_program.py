"""Anthropic's SDK, messages: a loop with one tool, whole answers and then answers in pieces."""

import json
import sys

import anthropic

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add numbers.", "input_schema": PARAMETERS}

row = json.loads(sys.stdin.readline())
client = anthropic.Anthropic()
messages = [{"role": "user", "content": f"What is {row['prompt']}"}]
asked = {"model": "policy", "max_tokens": 500, "system": "You add numbers.", "tools": [TOOL]}
said = client.messages.create(messages=messages, **asked)
for _ in range(3):
    messages.append({"role": "assistant", "content": said.content})
    results = []
    for use in (block for block in said.content if block.type == "tool_use"):
        result = str(use.input.get("a", 0) + use.input.get("b", 0))
        results.append({"type": "tool_result", "tool_use_id": use.id, "content": result})
    if not results:
        break
    messages.append({"role": "user", "content": results})
    with client.messages.stream(messages=messages, **asked) as stream:
        said = stream.get_final_message()
print(json.dumps({"answer": "".join(block.text for block in said.content if block.type == "text")}))
