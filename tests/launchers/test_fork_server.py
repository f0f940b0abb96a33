"""The fork server stays of one thread, and answers whoever still waits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from areal_core.errors import RunError
from areal_core.launchers.fork_server import ONE_THREAD
from areal_core.launchers.forking import ForkServer


def test_pyarrow_which_transformers_imports_where_it_is_installed_starts_no_thread() -> None:
    pytest.importorskip("pyarrow")
    count = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


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

    assert asyncio.run(check()) >= 1


def test_a_run_that_is_stopped_at_once_does_not_wait_for_imports() -> None:
    async def check() -> None:
        server = ForkServer()
        await asyncio.to_thread(server.close)
        with pytest.raises(RunError, match="was killed by SIGKILL"):
            await server.threads()

    asyncio.run(check())
