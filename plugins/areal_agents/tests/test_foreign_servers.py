"""Servers in other interpreters: their logs, their start and their end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal_agents.foreign_http import HttpConnection
from areal_agents.foreign_process import EnvironmentServerError, ForeignProgram
from areal_agents.foreign_server import ServerKeeper
from areal_agents.interpreter import _areal_serving
from areal_agents.nemo_gym.config import NemoGymSettings
from areal_core.errors import RunError

SERVE = """
import http.server, json, os, sys, threading, time
request = json.loads(sys.stdin.readline())
time.sleep(request.get("load_s", 0.0))
class Handler(http.server.BaseHTTPRequestHandler):
    first = True
    def do_GET(self):
        if Handler.first: time.sleep(request.get("answer_s", 0.0))
        Handler.first = False
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
sys.stderr.write(request.get("log", "") * request.get("times", 1)); sys.stderr.flush()
print(f"http://127.0.0.1:{server.server_port}", flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
"""


def keeper(folder: Path, request: dict[str, Any], **limits: float) -> ServerKeeper[HttpConnection]:
    program = folder / "serve.py"
    program.write_text(SERVE)
    settings = NemoGymSettings(server="sums", python=Path(sys.executable), **limits)
    return ServerKeeper(
        settings, "sums", ForeignProgram(program, settings, request, "sums"),
        lambda process: HttpConnection(settings, "sums", process, None),
    )  # fmt: skip


@pytest.mark.parametrize("end", ["", "\r", "\n"])
def test_a_log_of_long_lines_does_not_stop_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    async def run() -> None:
        servers = keeper(tmp_path, {"log": "x" * 300_000 + end, "times": 3})
        connection = await servers.connected()
        await connection.ask_health()
        await servers.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))
    assert capsys.readouterr().err.count("x") == 900_000


def test_a_server_that_loads_longer_than_its_silence_is_not_lost(tmp_path: Path) -> None:
    async def run() -> None:
        servers = keeper(tmp_path, {"answer_s": 1.5}, silence_timeout_s=0.4, start_timeout_s=60.0)
        connection = await servers.connected()
        assert not connection.loss
        await servers.close()

    asyncio.run(run())


@pytest.mark.parametrize("request_", [{"load_s": 60.0}, {"answer_s": 60.0}])
def test_one_limit_holds_for_loading_and_the_first_answer(tmp_path: Path, request_: dict[str, Any]) -> None:
    async def run() -> None:
        servers = keeper(tmp_path, request_, start_timeout_s=1.0)
        with pytest.raises(EnvironmentServerError, match=r"sums did not start and answer within start_timeout_s: 1"):
            await servers.connected()
        await servers.close()

    asyncio.run(run())


@pytest.mark.parametrize("request_", [{"load_s": 60.0}, {"answer_s": 60.0}])
def test_a_server_that_is_starting_is_ended_at_once(tmp_path: Path, request_: dict[str, Any]) -> None:
    async def run() -> None:
        servers = keeper(tmp_path, request_)
        opening = asyncio.create_task(servers.connected())
        await asyncio.sleep(0.5)
        await asyncio.wait_for(servers.close(), 30.0)
        with pytest.raises(EnvironmentServerError, match="sums was closed"):
            await opening

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("open(sys.argv[2], 'w').write('{\"a\": 1}\\n\\n{\"a\": 2}\\n')", ""),
        ("open(sys.argv[2], 'w').write('{\"a\": 1}\\n[2]\\n')", "the rows of sums, line 2: not a JSON object"),
        ("pass", "the rows of sums cannot be listed: the program wrote none"),
    ],
)
def test_rows_of_a_program_are_read_as_those_of_a_file(tmp_path: Path, body: str, problem: str) -> None:
    program = tmp_path / "rows.py"
    program.write_text(f"import sys\n{body}\n")
    settings = NemoGymSettings(server="sums", python=Path(sys.executable))
    listing = ForeignProgram(program, settings, {}, "sums")
    if problem:
        with pytest.raises(RunError, match=problem):
            listing.list_rows("rows")
    else:
        assert listing.list_rows("rows") == [{"a": 1}, {"a": 2}]


def test_an_application_that_fails_ends_the_process_and_says_why(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(_areal_serving.__file__).parent)!r})\nimport types\n"
        "class Server:\n    should_exit = False\n    def __init__(self, config): pass\n"
        "    async def serve(self, sockets): raise OSError('the disk is gone')\n"
        "sys.modules['uvicorn'] = types.SimpleNamespace(Config=lambda *a, **k: None, Server=Server)\n"
        "import _areal_serving\nsys.stdin.readline()\n"
        "_areal_serving.serve(None, _areal_serving.listen(), sys.stdout)\n"
    )
    settings = NemoGymSettings(server="sums", python=Path(sys.executable))

    async def run() -> str:
        process = await ForeignProgram(program, settings, {}, "sums").serve()
        text = await asyncio.wait_for(process.wait(), 60.0)
        await process.end()
        return text

    text = asyncio.run(run())
    assert "exit code 1" in text
    assert "the disk is gone" in text


def test_work_that_begins_after_the_loss_of_a_server_fails_with_its_reason(tmp_path: Path) -> None:
    async def run() -> None:
        servers = keeper(tmp_path, {})
        connection = await servers.connected()
        await connection.close()
        client = aiohttp.ClientSession(connector=connection.connector, connector_owner=False)
        with pytest.raises(EnvironmentServerError, match=r"sums .*was closed"):
            await connection.run(client.ws_connect("http://127.0.0.1:1/ws"))
        await client.close()
        await servers.close()

    asyncio.run(asyncio.wait_for(run(), 60.0))
