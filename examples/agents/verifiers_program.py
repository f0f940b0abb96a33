"""Plays one task of a taskset of verifiers, as a command agent; verifiers needs an environment of its own.

python -m venv verifiers && verifiers/bin/pip install verifiers==0.4.0 uv
workflow:
  type: agents/agent
  agent: {type: command, command: [verifiers/bin/python, verifiers_program.py, TASKSET, TOKENIZER]}
dataset: {type: agents/seeds, size: 1000}

TASKSET is a module that verifiers can import, TOKENIZER the model's folder; the row's `seed` is the task's place.
Prompts go to the policy as token ids, rendered by verifiers, and its tokens come back: nothing is tokenized twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment


async def play(taskset: str, tokenizer: str, place: int) -> dict[str, object]:
    """What the episode was worth."""
    client = vf.TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", renderer_model_name=tokenizer
    )
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = load_environment(vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": taskset}, "agent": seat}))
    context = vf.ModelContext(client=client, model=os.environ["OPENAI_MODEL"], sampling=vf.SamplingConfig())
    task = next(iter(environment.taskset.include(idx=[f"{place}:{place + 1}"])))
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise SystemExit(f"the task {place} of {taskset} failed: {errors}")
    return {"reward": sum(trace.reward for trace in episode.traces)}


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where uv is, which verifiers calls
    given = json.loads(sys.stdin.readline())
    sys.path.insert(0, str(Path.cwd()))
    print(json.dumps(asyncio.run(play(sys.argv[1], sys.argv[2], given["seed"]))))
