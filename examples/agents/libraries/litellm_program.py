"""litellm: a loop with one tool, whole answers and then answers in pieces."""

import json
import sys

import litellm

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": PARAMETERS}}

row = json.loads(sys.stdin.readline())
messages = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": f"What is {row['prompt']}"}]
said = litellm.completion(model="openai/policy", messages=messages, tools=[TOOL]).choices[0].message
for _ in range(3):
    messages.append(said)
    for call in said.tool_calls or []:
        numbers = json.loads(call.function.arguments)
        result = str(numbers.get("a", 0) + numbers.get("b", 0))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not said.tool_calls:
        break
    pieces = list(litellm.completion(model="openai/policy", messages=messages, tools=[TOOL], stream=True))
    said = litellm.stream_chunk_builder(pieces, messages).choices[0].message
print(json.dumps({"answer": said.content or ""}))
