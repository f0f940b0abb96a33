"""Tools of true MCP servers: what they offer, how they fail, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from policies import Policy

from areal_agents.environments.config import ToolSettings
from areal_agents.environments.tool_servers import ToolServerError
from areal_agents.environments.tools import ToolWorkflow
from areal_core.config import resolve
from areal_core.errors import ConfigError, RunError

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SERVER = [sys.executable, str(HERE / "tool_server.py")]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def servers(folder: Path) -> list[int]:
    """Living processes that were started in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_one = entry.name.isdecimal() and (entry / "cwd").readlink() == folder
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if is_one else "Z"
        except OSError:
            continue
        if state != "Z" and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def none_left(folder: Path) -> bool:
    deadline = time.monotonic() + 60
    while found := servers(folder):
        if time.monotonic() > deadline:
            return not found
        time.sleep(0.05)
    return True


class Played:
    """Episodes of one workflow in one event loop: what the policy said and heard."""

    def __init__(self, folder: Path, *servers: dict[str, Any], **settings: Any) -> None:
        mcp = [{"folder": str(folder), **server} if "command" in server else server for server in servers]
        self.workflow = ToolWorkflow(ToolSettings.model_validate({"mcp": mcp, **settings}))
        self.folder = folder
        self.alive: list[int] = []

    async def episode(self, *texts: str) -> tuple[Any, list[str], str]:
        """The episode, what stood behind each answer, and what stood in front of the first."""
        policy = Policy("chat", lambda number: texts[min(number, len(texts) - 1)])
        generate = policy.generate

        async def watched(*given: Any, **named: Any) -> Any:
            self.alive.append(len(servers(self.folder)))
            return await generate(*given, **named)

        context = policy.context
        context.generate = watched
        episode = await self.workflow.run_episode({"prompt": "go"}, context)
        decode, heard = policy.tokenizer.decode, []
        for (prompt, said), (then, _) in zip(policy.said, policy.said[1:], strict=False):
            heard.append(decode(then[len(prompt) + len(said.output_ids) :]))
        return episode, heard, decode(policy.said[0][0])


def test_tools_of_a_server_are_told_and_called_beside_functions(tmp_path):
    played = Played(tmp_path, {"command": SERVER}, tools=[f"{HERE / 'calculator.py'}:add"])

    async def run() -> None:
        both = call("note", text="a", times=2) + call("add", a=2, b=3)
        episode, heard, opening = await played.episode(both, call("note", text="b"), "done")
        assert "Writes something down." in opening
        assert '"times": {"default": 1' in opening
        assert "<result>2 notes</result>" in heard[0]
        assert "<result>5</result>" in heard[0]
        assert "<result>3 notes</result>" in heard[1]
        assert (episode.metrics["agents/calls"], episode.metrics["agents/tool_errors"]) == (3, 0)
        _, heard, _ = await played.episode(call("note", text="c"), "done")
        assert "<result>4 notes</result>" in heard[0], "it is one server for all episodes of a worker"
        await played.workflow.close()

    asyncio.run(run())
    assert set(played.alive) == {1}
    assert none_left(tmp_path)


def test_a_server_sees_the_secrets_that_its_settings_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    played = Played(tmp_path, {"command": SERVER, "environment": {"KEY": "env:HF_TOKEN", "NOTE": "plain"}})

    async def run() -> None:
        asked = "".join(call("variable", wanted=name) for name in ("KEY", "NOTE", "HF_TOKEN"))
        _, heard, _ = await played.episode(asked, "done")
        for value in ("secret", "plain", "unknown"):
            assert f"<result>{value}</result>" in heard[0]
        await played.workflow.close()

    asyncio.run(run())


def test_each_episode_has_its_own_where_it_asks_for_it(tmp_path):
    played = Played(tmp_path, {"command": SERVER, "per": "episode"})

    async def run() -> None:
        for _ in range(2):
            _, heard, _ = await played.episode(call("note", text="a"), "done")
            assert "<result>1 notes</result>" in heard[0]
            assert servers(tmp_path) == []

    asyncio.run(run())
    assert set(played.alive) == {1}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (call("note", text=1, times="much"), "Input should be a valid integer"),
        (call("note"), "Field required"),
        (call("sum"), "there is no tool 'sum'; there are note, variable, crash, fail, sleep"),
        (call("fail"), "error: Error executing tool fail"),
        (call("sleep", seconds=1000), "error: the tool took longer than 2 s"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy(wrong, told, tmp_path):
    played = Played(tmp_path, {"command": SERVER}, tool_timeout_s=2 if "longer" in told else 300)
    episode, heard, _ = asyncio.run(played.episode(wrong, "I see."))
    assert told in heard[0]
    assert episode.metrics["agents/tool_errors"] == 1
    assert none_left(tmp_path), "it ends with its event loop"


def test_a_server_that_dies_is_started_again_and_the_loss_is_told(tmp_path):
    played = Played(tmp_path, {"command": SERVER})
    texts = [call("note", text="a"), call("crash"), call("note", text="b"), "done"]
    _, heard, _ = asyncio.run(played.episode(*texts))
    assert "<result>1 notes</result>" in heard[0]
    assert "error: the tool's server was lost and restarted; its earlier state is gone" in heard[1]
    assert "<result>1 notes</result>" in heard[2]
    assert none_left(tmp_path)


@pytest.mark.parametrize("per", ["worker", "episode"])
def test_a_cancelled_episode_leaves_nothing(per, tmp_path):
    """Not even a server that goes on when its input has ended."""
    played = Played(tmp_path, {"command": [*SERVER, "--deaf"], "per": per})

    async def run() -> None:
        task = asyncio.ensure_future(played.episode(call("sleep", seconds=600), "done"))
        while not played.alive:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await played.workflow.close()
        assert servers(tmp_path) == []

    asyncio.run(run())
    assert played.alive == [1]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([sys.executable, "-c", "exit(3)"], "does not start: MCPError: Connection closed"),
        ([*SERVER, "--mute"], "does not start: TimeoutError: it listed no tools within start_timeout_s: 1"),
        (["./nowhere"], "does not start: FileNotFoundError"),
    ],
)
def test_a_server_that_does_not_start_fails_the_episode(command, told, tmp_path):
    played = Played(tmp_path, {"command": command, "start_timeout_s": 1})
    with pytest.raises(ToolServerError) as caught:
        asyncio.run(played.episode("done"))
    assert told in str(caught.value)
    assert none_left(tmp_path)


def test_names_that_clash_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text('def note() -> str:\n    """Notes."""\n')
    for more in ({"tools": [f"{tmp_path}/mine.py:note"]}, {}):
        played = Played(tmp_path, *[{"command": SERVER}] * (1 if more else 2), **more)
        with pytest.raises(RunError, match=r"two tools are called note: from .* and from the MCP server"):
            asyncio.run(played.episode("done"))
        assert none_left(tmp_path)


def test_a_server_behind_an_address_is_asked(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    served = subprocess.Popen([*SERVER, "--http", str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.1)
        played = Played(tmp_path, {"url": f"http://127.0.0.1:{port}/mcp"})

        async def run() -> None:
            _, heard, _ = await played.episode(call("note", text="a"), "done")
            assert "<result>1 notes</result>" in heard[0]
            await played.workflow.close()

        asyncio.run(run())
        lost = Played(tmp_path, {"url": f"http://127.0.0.1:{port}/nowhere"})
        with pytest.raises(ToolServerError, match=f"the MCP server `http://127.0.0.1:{port}/nowhere` does not start"):
            asyncio.run(lost.episode("done"))
    finally:
        served.kill()
        served.wait()


@pytest.mark.parametrize(
    ("mcp", "told"),
    [
        ([{}], "write either command or url"),
        ([{"command": ["a"], "url": "http://b"}], "write either command or url"),
        ([{"command": ["no-such-program"]}], "mcp: the program no-such-program was not found or is not executable"),
        ([{"command": ["./server"]}], "mcp: the program ./server was not found or is not executable"),
    ],
)
def test_what_cannot_be_started_is_told_before_a_run(mcp, told):
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    words = ["workflow=" + json.dumps({"type": "agents/tools", "mcp": mcp})]
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["grpo", "agents"], words)
    assert told in str(caught.value)
