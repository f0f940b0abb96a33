"""Unchanged programs of the examples, trained: by SDKs and in another language, in workers of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from areal_grpo.demonstration.model import CHARACTERS, SPECIAL

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
AGENTS = Path(__file__).parents[2] / "examples" / "agents"
SMALL = ["steps=3", "model.path=model", "model.source=null", "sampling.max_new_tokens=8", "evaluation.limit=4"]
SMALL += ["rollout.batch_size=2", "rollout.group_size=2", "algorithm.group_filters=[]", "run_dir=run"]
SMALL += ["evaluation.every=3"]


@pytest.mark.parametrize("language", ["python", pytest.param("javascript", marks=pytest.mark.nightly)])
def test_an_agent_of_an_example_is_trained(workplace: Workplace, language: str) -> None:
    for name in ("sums.py", "sums.js", "sums.yaml"):
        shutil.copy(AGENTS / name, workplace.folder)
        assert len((AGENTS / name).read_text().splitlines()) <= 80
    words = ["rollout.workers=2"]
    if language == "javascript":
        if shutil.which("node") is None:
            pytest.skip("node is not installed")
        command = {"type": "command", "command": ["node", str(workplace.folder / "sums.js")]}
        words = [f"workflow.agent={json.dumps(command)}"]
    done = workplace.areal("run", "sums.yaml", *SMALL, *words)
    assert done.code == 0, done.err
    last = {name: value for line in workplace.metrics() for name, value in line.items()}
    assert last["step"] == 3
    assert last["agents/turns"] == last["agents/conversations"] == 1.0
    assert last["evaluation/agents/turns"] == 1.0
    assert last["agents/lost_answers"] == last["agents/rewritten_prefixes"] == 0.0
    assert last["agents/generating_s"] > 0.0
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_a_game_of_an_example_is_trained(workplace: Workplace) -> None:
    pytest.importorskip("gymnasium")
    shutil.copy(AGENTS / "frozen_lake.yaml", workplace.folder)
    assert len((AGENTS / "frozen_lake.yaml").read_text().splitlines()) <= 80
    done = workplace.areal("run", "frozen_lake.yaml", *SMALL, "workflow.max_turns=2")
    assert done.code == 0, done.err
    last = {name: value for line in workplace.metrics() for name, value in line.items()}
    assert last["step"] == 3
    assert "evaluation/reward" in last
    assert workplace.areal("audit", "run").code == 0


SERVED = """\
import os, sys
from areal_agents.environments.config import ToolSettings
from areal_agents.environments.tool_servers import ToolServers


class Asks:
    \"\"\"One turn, while a server runs that goes on when its input ends.\"\"\"

    def __init__(self):
        command = [sys.executable, os.environ["TOOL_SERVER"], "--deaf"]
        self.servers = ToolServers(ToolSettings.model_validate({"mcp": [{"command": command}]}).mcp)

    async def run_episode(self, row, context):
        import torch
        from areal_core.data import Episode, TrajectoryBuilder

        async with self.servers.offered() as offered:
            note = next(tool for schema, tool, _ in offered if schema["function"]["name"] == "note")
            assert "notes" in await note({"text": "a"})
        builder = TrajectoryBuilder()
        builder.add_context(context.tokenizer.encode(row["prompt"]))
        builder.add_generation(await context.generate(builder.input_ids, max_new_tokens=4))
        return Episode([builder.build()], len(builder.input_ids) / 100)
"""


@pytest.mark.nightly
def test_a_server_that_ignores_its_end_does_not_outlive_the_run(workplace: Workplace) -> None:
    pytest.importorskip("mcp")
    server = AGENTS.parents[1] / "plugins" / "areal_agents" / "tests" / "environments" / "tool_server.py"
    shutil.copy(server, workplace.folder / "a_tool_server.py")
    (workplace.folder / "asks.py").write_text(SERVED)
    workplace.environment["TOOL_SERVER"] = str(workplace.folder / "a_tool_server.py")
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2", "workflow=asks.py:Asks", "rewards=[]")
    assert done.code == 0, done.err
    left = [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if _says(path, str(workplace.folder / "a_tool_server"))
    ]
    assert left == []


def _says(path: Path, words: str) -> bool:
    try:
        return words.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "needs", "turns"),
    [
        pytest.param("calculator", "openai", 1, marks=pytest.mark.nightly),
        pytest.param("coder", "openai", 1, marks=pytest.mark.nightly),
        pytest.param("planner", "openai", 2, marks=pytest.mark.nightly),
        pytest.param("searcher", "rank_bm25", 1, marks=pytest.mark.nightly),
        ("openai_agents", "agents", 1),
    ],
)
def test_an_example_of_two_files_is_trained(workplace: Workplace, name: str, needs: str, turns: int) -> None:
    """With a model that has learned nothing; what the examples learn is in docs/benchmarks.md."""
    pytest.importorskip(needs)
    if name == "coder" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for path in AGENTS.glob("*.*"):
        assert len(path.read_text().splitlines()) <= 80
        shutil.copy(path, workplace.folder)
    done = workplace.areal("run", f"{name}.yaml", *SMALL, "evaluation.samples_per_prompt=1")
    assert done.code == 0, done.err
    last = {key: value for line in workplace.metrics() for key, value in line.items()}
    assert last["step"] == 3
    assert last["agents/turns"] == last["agents/chat_requests"] >= turns
    assert last["agents/conversations"] == turns
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_a_model_is_taught_the_form_of_a_call_and_its_calls_are_made(workplace: Workplace) -> None:
    """Lessons of a file's, phrases that are one token, and the tool's answer in the same trajectory."""
    for name in ("calculator.py", "calculator.yaml"):
        shutil.copy(AGENTS / name, workplace.folder)
    small = [word for word in SMALL if not word.startswith("model.")]
    words = ["model.source.steps=60", "model.source.seed=5", "rollout.group_size=8"]
    done = workplace.areal("run", "calculator.yaml", *small, *words, "sampling.max_new_tokens=16")
    assert done.code == 0, done.err
    last = {key: value for line in workplace.metrics() for key, value in line.items()}
    assert last["step"] == 3
    made = list((workplace.folder / "cache" / "taught_model").glob("*/model/config.json"))
    assert len(made) == 1
    phrases = 3
    assert json.loads(made[0].read_text())["vocab_size"] == len(SPECIAL) + len(CHARACTERS) + phrases
    assert sum(line.get("agents/calls", 0) + line.get("agents/malformed_calls", 0) for line in workplace.metrics()) > 0
    again = workplace.areal("run", "calculator.yaml", *small, *words, "run_dir=again", "steps=1")
    assert again.code == 0, again.err
    assert len(list((workplace.folder / "cache" / "taught_model").glob("*/model"))) == 1, "it is made once"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_programs_of_sdks_call_their_tools_and_their_tokens_are_exact() -> None:
    """The benchmark's own verdict: what was said is what was trained on, and the audits are clean."""
    benchmark = AGENTS.parents[1] / "benchmarks" / "agent_libraries.py"
    names = ["openai", "openai_responses", "anthropic"]
    words = [sys.executable, str(benchmark), *names, "--here"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if "yes (" in line]
    assert len(rows) == len(names)
    assert all("| 1 | " in row for row in rows), "each has called its tool once an episode"
