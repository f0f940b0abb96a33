"""Serve a taskset of verifiers, or list its tasks. areal runs this file in the interpreter that has verifiers.

    PYTHON areal_verifiers.py tasks FILE    write the data of each task to FILE, one JSON object per line
    PYTHON areal_verifiers.py serve         write the server's address to standard output, then serve

Both read one JSON object from standard input: `environment`, verifiers' config of an environment, and for `tasks` also
`limit`, the maximum number of tasks (null for all). The server ends when its standard input is closed, so it never
outlives the process that started it.

This file imports nothing of areal, and it needs verifiers 0.4.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import _areal_serving  # type: ignore[import-not-found]
import httpx
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_taskset, resolve_env_config

__all__ = ["ChatHarness"]
THIS_HARNESS = "areal_verifiers"
"""verifiers finds a harness by the name of its module."""


class ChatHarness(NullHarness):
    """A chat without tools, played in the process of the server.

    verifiers' own `null` harness starts a Python process for each episode, which takes two seconds of CPU. A task that
    has tool servers is played by `null`.
    """

    client: httpx.AsyncClient | None = None

    async def setup(self, runtime: Any) -> None:
        """Prepare nothing: only a task with tools needs a program, and `launch` prepares that."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Ask the model once. See `Harness.launch`."""
        if mcp_urls:
            return await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url)
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        if ChatHarness.client is None:  # one for all episodes: opening its certificates takes 20 ms
            ChatHarness.client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), trust_env=False)
        answer = await ChatHarness.client.post(
            f"{endpoint.rstrip('/')}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        # A full context ends the conversation, as in `null`; it is no failure.
        has_failed = answer.is_error and "context_length_exceeded" not in answer.text
        return ProgramResult(exit_code=int(has_failed), stdout="", stderr=answer.text if has_failed else "")


def read_config(environment: dict[str, Any]) -> Any:
    """Return verifiers' config, with agents that run on this machine unless the user has chosen otherwise.

    verifiers' own defaults are a container in Prime's cloud and a shell on the host.
    """
    taskset = environment["taskset"]["id"]
    roles = agent_config_fields(env_config_type(taskset, environment.get("id", ""))())
    filled = dict(environment)
    for role in roles:
        agent = {"runtime": {"type": "subprocess"}, **filled.get(role, {})}
        if default_harness_id(taskset) == "bash":  # the taskset has none of its own
            agent.setdefault("harness", {"id": THIS_HARNESS})
        filled[role] = agent
    return resolve_env_config(filled)


def write_tasks(config: Any, path: Path, limit: int | None) -> None:
    """Write the data of each task.

    Raises:
        SystemExit: the taskset has no end, and there is no limit.
    """
    taskset = load_taskset(config.taskset)
    if limit is None and not taskset.bounded:
        raise SystemExit(f"the taskset {config.taskset.id} has no end: set the data set's `size`")
    with path.open("w") as file:
        for task in taskset if limit is None else taskset.take(limit):
            file.write(json.dumps(task.data.model_dump(mode="json", exclude_defaults=True)) + "\n")


async def serve(config: Any, output: Any) -> None:
    """Serve until standard input is closed or serving fails, and end this process."""
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    await _areal_serving.serve_until_closed(server.run(), server.address, output)


def main() -> None:
    """Run the command of the command line."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a taskset prints does not mix with the results
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # verifiers calls uv
    sys.path.append(str(Path.cwd()))
    request = json.loads(sys.stdin.readline())
    config = read_config(request["environment"])
    if sys.argv[1] == "tasks":
        write_tasks(config, Path(sys.argv[2]), request["limit"])
    else:
        asyncio.run(serve(config, output))


if __name__ == "__main__":
    main()
