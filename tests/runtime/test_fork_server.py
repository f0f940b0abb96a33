"""The fork server: one thread and no CUDA context before it forks, and an answer for each caller that still waits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.runtime import local
from areal_core.runtime.environment import HUB_VARIABLE, member_environment
from areal_core.runtime.fork_server import ONE_THREAD, ForkedProcess, ForkServer
from areal_core.runtime.messages import ExitReport
from areal_core.runtime.rpc import Done, serve

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.runtime.rpc import Peer


def test_pyarrow_which_transformers_imports_where_it_is_installed_starts_no_thread() -> None:
    pytest.importorskip("pyarrow")
    count = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


PRELOADS = """
import os
from pathlib import Path
from areal_core.runtime.fork_server import preload
preload()
import torch
threads = len(os.listdir("/proc/self/task"))
files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
print(threads, torch.cuda.is_initialized(), [name for name in files if "nvidia" in name])
"""


def test_what_is_preloaded_starts_no_thread_and_no_cuda_context() -> None:
    """Neither survives a fork: locks of other threads stay locked, and CUDA refuses to work."""
    pytest.importorskip("torch")
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run([sys.executable, "-c", PRELOADS], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1 False []\n"


def test_who_stops_waiting_for_an_answer_takes_it_from_nobody_else() -> None:
    """As a run that is stopped while its processes start."""

    async def check() -> int:
        server = ForkServer()
        try:
            waiting = asyncio.ensure_future(server.threads())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            return await server.threads()
        finally:
            await asyncio.to_thread(server.close)

    assert asyncio.run(check()) == 1


def test_a_run_that_is_stopped_at_once_does_not_wait_for_imports() -> None:
    async def check() -> None:
        server = ForkServer()
        await asyncio.to_thread(server.close)
        with pytest.raises(RunError, match="was killed by SIGKILL"):
            await server.threads()

    asyncio.run(check())


EXITS = """
import os, sys
from areal_core.runtime.fork_server import _run_member
os.setsid = lambda: None
_run_member(["exits_with"], dict(os.environ), log=None)
"""


def first_on_the_path(folder: Path) -> str:
    """Return PYTHONPATH with a folder before what it has here, if anything."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(("argument", "code", "text"), [("", 0, ""), ("7", 7, ""), ("'no room'", 1, "no room\n")])
def test_a_member_exits_as_a_program_of_python_does(tmp_path: Path, argument: str, code: int, text: str) -> None:
    (tmp_path / "exits_with.py").write_text(f"import sys\nsys.exit({argument})")
    environment = {**os.environ, "PYTHONPATH": first_on_the_path(tmp_path)}
    done = subprocess.run([sys.executable, "-c", EXITS], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, text)


def test_a_group_of_forked_members_is_ended_without_their_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid may be another process's as soon as its member has ended, which the launcher does not know yet."""
    monkeypatch.setattr(local, "kill_tree", lambda pid: pytest.fail(f"process {pid} is killed"))
    monkeypatch.setattr(os, "kill", lambda pid, _: pytest.fail(f"process {pid} is killed"))
    sent: list[int] = []
    code = Future[int]()

    def send_signal(number: int) -> None:
        sent.append(number)
        if number == signal.SIGKILL:
            code.set_result(-number)

    async def check() -> str:
        group = local.LocalGroup([ForkedProcess(os.getpid(), code, send_signal)])
        group.signal(signal.SIGTERM)
        await group.end()
        return await group.wait()

    assert asyncio.run(check()) == "was killed by SIGKILL"
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_a_signal_reaches_the_member_of_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import signal\nwhile True:\n    signal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", first_on_the_path(tmp_path))

    async def serve_members(peer: Peer) -> None:
        message, number = await peer.receive_request()  # of a guard: its exit report
        assert isinstance(message, ExitReport)
        peer.reply(number, Done())
        await peer.receive()

    async def check() -> list[int | None]:
        server = ForkServer()
        hub = await serve(f"unix:{tmp_path / 'hub'}", serve_members)
        group = ProcessGroup("worker", "worker", ["python", "-m", "sleeps"], count=2)
        try:
            environments = [
                {**os.environ, HUB_VARIABLE: hub.address, **member_environment(group, {index: Place("here", [])})}
                for index in range(2)
            ]
            first, second = [await server.fork(["sleeps"], environment) for environment in environments]
            second.send_signal(signal.SIGUSR2)  # forks ignore SIGTERM while they begin
            assert await second.wait() == -signal.SIGUSR2
            assert first.returncode is None
            second.send_signal(signal.SIGKILL)  # it has ended
            first.send_signal(signal.SIGKILL)
            await first.wait()
            return [first.returncode, second.returncode]
        finally:
            hub.close()
            await asyncio.to_thread(server.close)

    assert asyncio.run(check()) == [-signal.SIGKILL, -signal.SIGUSR2]
