"""Environments of areal and of libraries, played by a policy whose tokens are known: a table of rewards and costs.

    python benchmarks/agent_environments.py [--only own verifiers ...] [--episodes 400] [--concurrent 32]

Libraries that areal shares no interpreter with have a virtual environment below `~/.cache/areal/servers`, which this
program makes once. Tokens are exact if the episode's are those that the policy got and sampled. The CPU time is that of
this process, with the policy's tokenizer, and that of the environment server with its children.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "areal_agents" / "tests"))  # for the policy whose tokens are known
MAKER = ROOT / "tests" / "servers_on_cpu" / "make_environment.py"
EXAMPLES = ROOT / "examples" / "environments"


@dataclass
class Case:
    """An environment to play.

    Attributes:
        version: version of the library.
        workflow: plays it.
        row: row of the data set.
        texts: what the policy says, in order; it repeats the last.
    """

    version: str
    workflow: Any
    row: dict[str, Any]
    texts: Sequence[str]


def chosen(workflow: dict[str, Any]) -> Any:
    """Return a workflow as a config chooses it."""
    from areal_core.config import resolve

    words = ["workflow=" + json.dumps(workflow), "rewards=[]"]
    return resolve(None, ["grpo", "agents"], words).config.workflow.build()


class Sums:
    """An environment of areal in this process: one sum."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Ask the sum."""
        self._answer = row["answer"]
        return [{"role": "user", "content": row["question"]}]

    async def step(self, completion: str) -> Any:
        """Compare the answer."""
        from areal_core.sdk import StepResult

        return StepResult(reward=float(completion == self._answer), terminated=True)


def own() -> Case:
    """areal's own environment."""
    environment = f"{Path(__file__).resolve()}:Sums"
    workflow = chosen({"type": "multi_turn", "environment": {"type": environment}})
    return Case(version("areal-core"), workflow, {"question": "1+2=", "answer": "3"}, ["3"])


def gymnasium() -> Case:
    """Six steps across a lake."""
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}
    lake = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False}, "actions": moves, "observation": "rendering"}
    workflow = chosen({"type": "multi_turn", "max_turns": 8, "environment": {"type": "agents/gymnasium", **lake}})
    return Case(
        version("gymnasium"), workflow, {"seed": 1}, ["right", "right", "down", "down", "I see. Down!", "right"]
    )


def textarena() -> Case:
    """One number after another until it is found."""
    game = {"id": "GuessTheNumber-v0", "arguments": {"max_number": 4}}
    workflow = chosen({"type": "multi_turn", "max_turns": 8, "environment": {"type": "agents/textarena", **game}})
    return Case(version("textarena"), workflow, {"seed": 1}, [f"[{number}]" for number in range(1, 5)])


def mcp() -> Case:
    """Two answers, of which one calls a tool of a server that all episodes share."""
    server = ROOT / "plugins" / "areal_agents" / "tests" / "environments" / "tool_server.py"
    workflow = chosen({"type": "agents/tools", "mcp": [{"command": [sys.executable, str(server)]}]})
    # The episodes have no reward of their own; `Policy.score` gives 1.
    call = '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>'
    return Case(version("mcp"), workflow, {"prompt": "Begin."}, [call, "done"])


def verifiers() -> Case:
    """A sum of the taskset of the examples."""
    from areal_agents.verifiers.config import VerifiersDataSettings
    from areal_agents.verifiers.dataset import VerifiersDataset

    python = make_environment("verifiers")
    taskset = {"taskset": "sums-taskset", "python": str(python), "folder": str(EXAMPLES)}
    (row,) = VerifiersDataset(VerifiersDataSettings(size=1, **taskset))
    workflow = chosen({"type": "agents/verifiers", **taskset})
    return Case(version_in(python, "verifiers"), workflow, dict(row), [row["task"]["answer"]])


def nemo_gym() -> Case:
    """A sum of the resources server of the examples."""
    python = make_environment("nemo_gym")
    server = {"server": "sums", "python": str(python), "folder": str(EXAMPLES)}
    row = {"responses_create_params": {"input": "1+2="}, "answer": "3"}
    return Case(version_in(python, "nemo-gym"), chosen({"type": "agents/nemo_gym", **server}), row, ["3"])


def openenv() -> Case:
    """A sum of the environment of the examples."""
    from areal_agents.openenv.config import OpenEnvDataSettings
    from areal_agents.openenv.dataset import OpenEnvDataset

    python = make_environment("openenv")
    app = {"app": "openenv_sums:app", "python": str(python), "folder": str(EXAMPLES)}
    (row,) = OpenEnvDataset(OpenEnvDataSettings(size=1, **app))
    first, second = row["question"].removesuffix("=").split("+")
    workflow = chosen({"type": "agents/openenv", "observation_key": "text", **app})
    return Case(version_in(python, "openenv"), workflow, dict(row), [str(int(first) + int(second))])


def make_environment(name: str) -> Path:
    """Return the Python of a library's environment, which is made if it is not there."""
    command = [sys.executable, str(MAKER), name]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def version_in(python: Path, package: str) -> str:
    """Return the version of a package of another Python."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


async def play(case: Case, seed: int) -> tuple[float, bool]:
    """Return the reward of one episode, and whether its tokens are exact."""
    from policies import Policy

    policy = Policy("chat", lambda number: case.texts[min(number, len(case.texts) - 1)], seed=seed)
    episode = await case.workflow.run_episode(case.row, policy.context)
    (trajectory,) = episode.trajectories
    prompt, last = policy.said[-1]
    return float(episode.reward), trajectory.tokens["input_ids"].tolist() == [*prompt, *last.output_ids]


async def measure(case: Case, episodes: int, concurrent: int) -> list[str]:
    """Return the columns of one environment. The first episode starts its server and is not measured."""
    free = asyncio.Semaphore(concurrent)

    async def one(seed: int) -> tuple[float, bool]:
        async with free:
            return await play(case, seed)

    try:
        await play(case, 0)
        own_before, others_before, began = time.process_time(), sum(map(cpu_of, children())), time.monotonic()
        played = await asyncio.gather(*(one(seed) for seed in range(episodes)))
        seconds = time.monotonic() - began
        own_cpu, others = time.process_time() - own_before, sum(map(cpu_of, children())) - others_before
    finally:
        if hasattr(case.workflow, "close"):
            await case.workflow.close()
    mean = sum(reward for reward, _ in played) / episodes
    exact = "yes" if all(is_exact for _, is_exact in played) else "NO"
    costs = [f"{episodes / seconds:.0f}", f"{1000 * own_cpu / episodes:.1f}", f"{1000 * others / episodes:.1f}"]
    return [case.version, f"{mean:g}", exact, *costs]


def children(process: int | None = None) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs."""
    for task in Path(f"/proc/{process or os.getpid()}/task").glob("*"):
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from children(child)


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def main() -> None:
    """Print the table."""
    cases: dict[str, Callable[[], Case]] = {
        each.__name__: each for each in (own, gymnasium, textarena, mcp, verifiers, nemo_gym, openenv)
    }
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--concurrent", type=int, default=32)
    asked = parser.parse_args()
    print("environment | version | reward | tokens exact | episodes/s | ms of CPU | ms in the server")
    print("---|---|---|---|---|---|---")
    for name in asked.only:
        columns = asyncio.run(measure(cases[name](), asked.episodes, asked.concurrent))
        print(" | ".join([name, *columns]), flush=True)


if __name__ == "__main__":
    main()
