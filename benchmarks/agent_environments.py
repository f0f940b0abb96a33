"""Environments and tool servers of libraries, each played by a policy whose tokens are known: a table.

    python benchmarks/agent_environments.py [--only gymnasium textarena mcp openenv verifiers] [--fresh]

gymnasium, TextArena and the MCP SDK are those of this Python. OpenEnv and verifiers have a virtual environment each
below `~/.cache/areal/servers`, made once (`--fresh` makes it anew). Tokens are exact where what would be trained
on is what the policy was given and said, token by token; an adapter that plays text alone has none to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "areal" / "servers"
sys.path.insert(0, str(ROOT / "plugins" / "areal_agents" / "tests"))  # for the policy whose tokens are known
MAKER = ROOT / "tests" / "servers_on_cpu" / "make_environment.py"
EPISODES = 3

COUNTING = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    echoed_message: str = ""

class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.number = seed or 0
        return Heard(echoed_message=f"count on from {self.number}", done=False, reward=0.0)

    def step(self, action, **more):
        self.number += 1
        is_right = action.message.strip() == str(self.number)
        return Heard(echoed_message="go on" if is_right else "no", done=not is_right, reward=float(is_right))

    @property
    def state(self):
        return State(episode_id="counting", step_count=0)

uvicorn.run(create_app(Counting, Say, Heard, env_name="counting", max_concurrent_envs=3), port=int(sys.argv[1]),
            log_level="critical")
"""
COUNT = """
import asyncio, json, sys
from areal_agents.environments.config import OpenEnvSettings
from areal_agents.environments.openenv_sessions import OpenEnvEnvironment

async def play(seed):
    settings = OpenEnvSettings(url=sys.argv[1], reset_keys=["seed"], observation_key="echoed_message")
    environment, earned = OpenEnvEnvironment(settings), 0.0
    try:
        (opening,) = await environment.reset({"seed": seed})
        assert opening["content"] == f"count on from {seed}", opening
        for said in (seed + 1, seed + 2, "enough"):
            result = await environment.step(str(said))
            earned += result.reward
        assert result.terminated, result
    finally:
        await environment.close()
    return earned

async def main():
    at_once = await asyncio.gather(*(play(seed) for seed in range(3)))  # as many as the server has sessions
    print(json.dumps([*at_once, *[await play(seed) for seed in range(3)]]))

asyncio.run(main())
"""


class Ran(NamedTuple):
    """A row of the table."""

    version: str
    what: str
    rewards: list[float]
    exact: str


def make_environment(name: str, *, fresh: bool) -> Path:
    """Return the Python of a library's environment, which is made if it is not there."""
    folder = CACHE / name
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(MAKER), name, "--folder", str(folder)]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


async def play(workflow: Any, rows: list[dict[str, Any]], *texts: str) -> tuple[list[float], str]:
    """Rewards of episodes in which the policy says these texts, and whether their tokens are exact."""
    from policies import Policy

    rewards, exact = [], True
    for row in rows:
        policy = Policy("chat", lambda number: texts[min(number, len(texts) - 1)], seed=len(rewards))
        episode = await workflow.run_episode(row, policy.context)
        (trajectory,) = episode.trajectories
        prompt, last = policy.said[-1]
        exact &= trajectory.tokens["input_ids"].tolist() == [*prompt, *last.output_ids]
        rewards.append(float(episode.reward))
    return rewards, "yes" if exact else "NO"


def multi_turn(environment: str, **settings: Any) -> Any:
    """The core's workflow around one environment, chosen as a config chooses it."""
    from areal_core.config import resolve

    chosen = {"type": "multi_turn", "max_turns": 8, "environment": {"type": environment, **settings}}
    words = ["workflow=" + json.dumps(chosen), "rewards=[]"]
    return resolve(None, ["grpo", "environments"], words).config.workflow.build()


def run_gymnasium(fresh: bool, folder: Path) -> Ran:
    """Across a lake without holes in the way."""
    del fresh, folder
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}
    lake = multi_turn(
        "agents/gymnasium", id="FrozenLake-v1", arguments={"is_slippery": False}, actions=moves,
        observation="rendering",
    )  # fmt: skip
    texts = ("right", "right", "down", "down", "I see. Down!", "right")
    return Ran(version("gymnasium"), "FrozenLake-v1", *asyncio.run(play(lake, rows(), *texts)))


def run_textarena(fresh: bool, folder: Path) -> Ran:
    """One after another until the number is found."""
    del fresh, folder
    game = multi_turn("agents/textarena", id="GuessTheNumber-v0", arguments={"max_number": 4})
    guesses = [f"[{number}]" for number in range(1, 5)]
    return Ran(version("textarena"), "GuessTheNumber-v0", *asyncio.run(play(game, rows(), *guesses)))


def run_mcp(fresh: bool, folder: Path) -> Ran:
    """A server for each episode."""
    del fresh, folder
    from areal_agents.environments.config import ToolSettings
    from areal_agents.environments.tools import ToolWorkflow

    server = ROOT / "plugins" / "areal_agents" / "tests" / "environments" / "tool_server.py"
    mcp = [{"command": [sys.executable, str(server)], "per": "episode"}]
    call = '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>'
    tools = ToolWorkflow(ToolSettings.model_validate({"mcp": mcp, "tool_timeout_s": 300}))
    return Ran(version("mcp"), "a server on stdio", *asyncio.run(play(tools, rows(), call, "done")))


def run_openenv(fresh: bool, folder: Path) -> Ran:
    """Three sessions at once, then three more in their places."""
    python = make_environment("openenv", fresh=fresh)
    for name, text in (("server.py", COUNTING), ("count.py", COUNT)):
        (folder / name).write_text(text)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = subprocess.Popen([python, "server.py", str(port)], cwd=folder)
    try:
        deadline = time.monotonic() + 180
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("the OpenEnv server does not listen")
            time.sleep(0.2)
        sources = f"{ROOT}:{ROOT / 'plugins/areal_agents/src'}"
        command = [python, "count.py", f"http://127.0.0.1:{port}"]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": sources},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    finally:
        server.kill()
        server.wait()
    return Ran(version_in(python, "openenv"), "a counting game", json.loads(done.stdout), "text alone")


def run_verifiers(fresh: bool, folder: Path) -> Ran:
    """The taskset of the examples."""
    from areal_agents.verifiers.config import VerifiersDataSettings, VerifiersSettings
    from areal_agents.verifiers.dataset import VerifiersDataset
    from areal_agents.verifiers.workflow import VerifiersWorkflow

    del folder
    python = make_environment("verifiers", fresh=fresh)
    taskset = {"taskset": "sums-taskset", "python": str(python), "folder": str(ROOT / "examples" / "environments")}
    tasks = VerifiersDataset(VerifiersDataSettings(size=EPISODES, **taskset))

    async def run() -> tuple[list[float], str]:
        workflow = VerifiersWorkflow(VerifiersSettings(**taskset))
        try:
            return await play(workflow, list(tasks), tasks[0]["task"]["answer"])
        finally:
            await workflow.close()

    return Ran(version_in(python, "verifiers"), "a taskset, harness areal_verifiers", *asyncio.run(run()))


def rows() -> list[dict[str, Any]]:
    """One for each episode."""
    return [{"seed": seed, "prompt": "Begin."} for seed in range(1, EPISODES + 1)]


def version_in(python: Path, package: str) -> str:
    """Of a package of another Python's."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def main() -> None:
    """Print the table."""
    runs = {"gymnasium": run_gymnasium, "textarena": run_textarena, "mcp": run_mcp}
    runs |= {"openenv": run_openenv, "verifiers": run_verifiers}
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=runs, default=list(runs))
    parser.add_argument("--fresh", action="store_true", help="make virtual environments anew")
    asked = parser.parse_args()
    print("| library | version | what ran | episodes | rewards | tokens exact |\n|---|---|---|---|---|---|")
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            ran = runs[name](asked.fresh, Path(folder))
        rewards = " ".join(f"{reward:g}" for reward in ran.rewards)
        print(f"| {name} | {ran.version} | {ran.what} | {len(ran.rewards)} | {rewards} | {ran.exact} |", flush=True)


if __name__ == "__main__":
    main()
