"""Resources servers of NeMo Gym, each played through areal and called directly with the same answers: a table.

    python benchmarks/nemo_gym_servers.py PYTHON [--only reasoning_gym mcqa ...]

PYTHON is an interpreter with nemo-gym 0.4.0 and reasoning-gym. The rows are the example rows of each server. The
policy answers each row rightly in one episode and wrongly in another. Its answers are known, so the direct calls are
written by hand: /seed_session, the tools, and /verify, with the cookies of a client that knows nothing of areal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "areal_agents" / "tests"))  # for the policy whose tokens are known

if TYPE_CHECKING:
    from collections.abc import Callable

Row = dict[str, Any]
Call = tuple[str, dict[str, Any]]
ROWS = 5
ENDING = "done"


def boxed(key: str) -> Callable[[Row], str]:
    """Answer with the value of a key in a box."""
    return lambda row: f"\\boxed{{{row[key]}}}"


def count(row: Row) -> list[Call]:
    """Count up to what is expected."""
    missing = row["expected_count"] - row["initial_count"]
    return [("increment_counter", {"count": 1}), ("increment_counter", {"count": missing - 1})]


def parents(row: Row) -> str:
    """List the nodes that are expected."""
    nodes = row["expected_answer"]
    return f"Final Answer: [{', '.join(json.loads(nodes) if isinstance(nodes, str) else nodes)}]"


def written_calls(key: str) -> Callable[[Row], list[Call]]:
    """Call what a key of the row lists."""

    def calls(row: Row) -> list[Call]:
        listed = [(call["name"], call["arguments"]) for call in row[key]]
        return [(name, json.loads(given) if isinstance(given, str) else given) for name, given in listed]

    return calls


RIGHT: dict[str, Callable[[Row], str | list[Call]]] = {
    "reasoning_gym": lambda row: f"<answer>{row['answer']}</answer>",
    "mcqa": boxed("expected_answer"),
    "gpqa_diamond": boxed("expected_answer"),
    "arc_agi": boxed("expected_output"),
    "ruler": lambda row: ", ".join(row["outputs"]),
    "graphwalks": parents,
    "example_session_state_mgmt": count,
    "example_multi_step": lambda row: [("extract_synonym_values", {"synonym_values": row["expected_synonym_values"]})],
    "workplace_assistant": written_calls("ground_truth"),
    "xlam_fc": written_calls("expected_answers"),
}
"""What the policy does in each server: one text, or calls and then a text."""


async def call_directly(address: str, row: Row, action: str | list[Call]) -> float:
    """The reward of a server for some answers, without areal."""
    output: list[dict[str, Any]] = []
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        (await client.post(f"{address}/seed_session", json=row)).raise_for_status()
        calls = [] if isinstance(action, str) else action
        for number, (name, arguments) in enumerate(calls):
            call = {"type": "function_call", "id": f"f{number}", "call_id": f"c{number}", "name": name}
            output.append({**call, "arguments": json.dumps(arguments), "status": "completed"})
        for number, (name, arguments) in enumerate(calls):
            text = await (await client.post(f"{address}/{name}", json=arguments)).text()
            output.append({"type": "function_call_output", "call_id": f"c{number}", "output": text})
        text = action if isinstance(action, str) else ENDING
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
        response = {"id": "r", "created_at": 0, "model": "p", "object": "response", "output": [*output, message]}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        answer = await client.post(f"{address}/verify", json={**row, "response": response})
        answer.raise_for_status()
        return float((await answer.json())["reward"])


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def compare(python: Path, server: str) -> str:
    """Play and call one server; its row of the table."""
    from policies import Policy

    from areal_agents.nemo_gym.config import NemoGymDataSettings, NemoGymSettings
    from areal_agents.nemo_gym.dataset import NemoGymDataset
    from areal_agents.nemo_gym.workflow import NemoGymWorkflow

    dataset = NemoGymDataset(NemoGymDataSettings(server=server, python=python, size=ROWS))
    rows = [dict(row) for row in dataset]
    settings = NemoGymSettings(server=server, python=python, max_tokens=1_000_000)
    workflow = NemoGymWorkflow(settings)
    rewards: dict[str, list[float]] = {"right": [], "wrong": []}
    is_equal, began_at, start_s = True, time.monotonic(), 0.0
    own_s = server_s = 0.0
    try:
        for row in rows:
            for kind, action in (("right", RIGHT[server](row)), ("wrong", "nonsense")):
                calls = [] if isinstance(action, str) else action
                written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
                first = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
                texts = [action] if isinstance(action, str) else [first, ENDING]
                policy = Policy("chat", lambda number, texts=texts: texts[number])
                connection = await workflow._server._keeper.connected()
                assert connection.process is not None
                start_s = start_s or time.monotonic() - began_at
                own, foreign = time.process_time(), cpu_of(connection.process.pid)
                episode = await workflow.run_episode(row, policy.context)
                own_s += time.process_time() - own
                server_s += cpu_of(connection.process.pid) - foreign
                direct = await call_directly(connection.process.address, row, action)
                is_equal = is_equal and episode.reward == direct
                rewards[kind].append(episode.reward)
    finally:
        await workflow.close()
    shown = " | ".join(" ".join(f"{reward:g}" for reward in rewards[kind]) for kind in rewards)
    cost = " | ".join(f"{1000 * seconds / (2 * len(rows)):.0f}" for seconds in (own_s, server_s))
    return f"| {server} | {shown} | {'yes' if is_equal else 'NO'} | {start_s:.0f} | {cost} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("python", type=Path, help="interpreter that has NeMo Gym")
    parser.add_argument("--only", nargs="+", choices=RIGHT, default=list(RIGHT))
    asked = parser.parse_args()
    print("| server | right answers | wrong answers | equals a direct call | start, s | CPU: areal, ms | server, ms |")
    print("|---|---|---|---|---|---|---|")
    for server in asked.only:
        print(asyncio.run(compare(asked.python, server)), flush=True)


if __name__ == "__main__":
    main()
