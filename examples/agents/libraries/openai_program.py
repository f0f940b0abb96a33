"""OpenAI's SDK, chat completions: a loop with one tool, each answer in pieces."""

import json
import sys

import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add numbers.", "parameters": PARAMETERS}}

row = json.loads(sys.stdin.readline())
client = openai.OpenAI()
messages = [{"role": "system", "content": "You add numbers."}, {"role": "user", "content": f"What is {row['prompt']}"}]
for _ in range(3):
    try:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
            said = stream.get_final_completion().choices[0].message
    except openai.LengthFinishReasonError as error:  # what this SDK makes of an answer that is cut
        said = error.completion.choices[0].message
    messages.append(said)
    for call in said.tool_calls or []:
        numbers = json.loads(call.function.arguments)
        result = str(numbers.get("a", 0) + numbers.get("b", 0))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not said.tool_calls:
        break
print(json.dumps({"answer": said.content or ""}))
