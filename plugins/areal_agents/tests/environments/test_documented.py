"""The configs of docs/guides/agents.md, as they stand there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_agents.environments.tools import ToolWorkflow
from areal_core.config import resolve

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PAGE = (HERE.parents[3] / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The config of the page that begins with a comment, over a preset that trains."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # `python` of the page is this one
    shutil.copy(HERE / "tool_server.py", tmp_path / "server.py")

    def resolved(comment: str) -> Any:
        found = re.search(rf"^```yaml\n# {comment}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        assert found, comment
        begin = "plugins: [grpo, agents]\npreset: grpo/addition\nrewards: []\n"
        (tmp_path / "run.yaml").write_text(begin + found[1])
        return resolve(str(tmp_path / "run.yaml"), [], []).config

    return resolved


@pytest.mark.parametrize(("comment", "opening"), [("gymnasium", "[S]FFF"), ("TextArena", "between 1 and 20")])
def test_a_game_of_the_page_is_played(comment, opening, read):
    pytest.importorskip("gymnasium")
    pytest.importorskip("textarena")
    config = read(comment)
    environment = config.workflow.settings.environment.build()

    async def play() -> tuple[str, Any]:
        messages = await environment.reset(config.dataset.build()[0])
        return messages[-1]["content"], await environment.step("I say [5] and go right")

    said, result = asyncio.run(play())
    assert opening in said
    assert result.observation


@pytest.mark.slow
def test_servers_of_the_page_are_started(read):
    pytest.importorskip("mcp")
    settings = read("MCP servers").workflow.settings
    worker, episode, behind = settings.mcp
    assert (worker.per, episode.per, behind.url) == ("worker", "episode", "http://127.0.0.1:9000/mcp")
    for server in (worker, episode):
        workflow = ToolWorkflow(settings.model_copy(update={"mcp": [server]}))

        async def names(workflow: ToolWorkflow = workflow) -> set[str]:
            async with workflow._servers.offered() as offered:
                found = {schema["function"]["name"] for schema, _, _ in offered}
            await workflow.close()
            return found

        assert asyncio.run(names()) == {"note", "crash", "fail", "sleep", "variable"}
