"""The agent of a machine: how it meets the launcher, and what it does at a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.runtime.rpc import Credentials, Failed, serve
from areal_nodes.agent import run_agent
from areal_nodes.config import ExternalSettings
from areal_nodes.launcher import ExternalLauncher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from areal_core.runtime.rpc import Peer

LIMIT_S = 30.0
CREDENTIALS = Credentials.create(2)


@asynccontextmanager
async def hub(handler: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[str]:
    """Serve connections of agents with a handler; its address."""
    server = await serve("tcp:127.0.0.1:0", handler, lambda: CREDENTIALS)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server.address
    finally:
        server.close()


def test_agents_of_one_name_get_names_of_their_own_and_leave_when_they_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_NODE", "one")

    async def check() -> None:
        launcher = ExternalLauncher(ExternalSettings(nodes=2, host="127.0.0.1"))
        connections: list[Peer] = []

        async def accept(connection: Peer) -> None:
            connections.append(connection)
            await launcher.accept_node(connection)

        accepted: list[int] = []
        async with hub(accept) as address:
            former = Credentials(CREDENTIALS.token, 1)  # an agent may come with an earlier attempt
            agents = [
                asyncio.ensure_future(run_agent(address, shown, lambda: accepted.append(1)))
                for shown in (CREDENTIALS, former)
            ]
            names = [node.name for node in await launcher.nodes([])]
            assert names == ["one", "one-2"]
            for connection in connections:
                connection.abort()
            assert await asyncio.gather(*agents) == [True, True]
            assert len(accepted) == 2

    asyncio.run(check())


def test_a_driver_whose_launcher_accepts_no_machines_is_an_error_with_the_launcher_that_does() -> None:
    async def refuse(connection: Peer) -> None:
        connection.notify(Failed("the launcher of this run accepts no machines"))

    async def check() -> None:
        async with hub(refuse) as address:
            await run_agent(address, CREDENTIALS, lambda: pytest.fail("it was accepted"))

    with pytest.raises(RunError, match="refuses this machine: the launcher of this run accepts no machines") as caught:
        asyncio.run(check())
    assert "launcher.type=external" in caught.value.hints[-1]


def test_a_driver_that_dies_before_it_accepts_the_machine_has_not_served_it() -> None:
    async def die(connection: Peer) -> None:
        connection.abort()

    async def check() -> bool:
        async with hub(die) as address:
            return await run_agent(address, CREDENTIALS, lambda: pytest.fail("it was accepted"))

    assert asyncio.run(check()) is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_program_without_members_and_the_former_handlers_are_back(number: signal.Signals) -> None:
    former = signal.signal(number, signal.default_int_handler)
    launcher = ExternalLauncher(ExternalSettings(host="127.0.0.1"))

    async def check() -> Any:
        async with hub(launcher.accept_node) as address:
            agent = asyncio.ensure_future(run_agent(address, CREDENTIALS, lambda: None))
            await launcher.nodes([])
            while signal.getsignal(number) is signal.default_int_handler:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), number)
            return await agent

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            asyncio.run(check())
        assert caught.value.args == (number,)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, former)


def test_a_machine_with_the_token_of_another_run_is_refused_with_the_reason() -> None:
    async def check() -> None:
        async with hub(ExternalLauncher(ExternalSettings(host="127.0.0.1")).accept_node) as address:
            await run_agent(address, Credentials.create(2), lambda: pytest.fail("it was accepted"))

    with pytest.raises(RunError, match="refuses this machine: the token is another run's"):
        asyncio.run(check())


REPORTS_SIGNALS = """
import pathlib, signal, sys
file = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda number, _: file.with_suffix(".signal").write_text(str(number)))
file.touch()
while True:
    signal.pause()
"""


def test_members_are_sent_sigterm_at_a_signal_that_they_ignore(tmp_path: Path) -> None:
    """A member reports SIGTERM to the driver."""
    former = signal.signal(signal.SIGHUP, signal.default_int_handler)
    launcher = ExternalLauncher(ExternalSettings(host="127.0.0.1"))
    command = [sys.executable, "-c", REPORTS_SIGNALS, str(tmp_path / "started")]
    group = ProcessGroup("worker", "worker", command)

    async def exists(path: Path) -> None:
        while not path.exists():
            await asyncio.sleep(0.01)

    async def check() -> None:
        async with hub(launcher.accept_node) as address:
            agent = asyncio.ensure_future(run_agent(address, CREDENTIALS, lambda: None))
            nodes = await launcher.nodes([])
            running = await launcher.start(group, {0: Place(nodes[0].name, [])}, {})
            await exists(tmp_path / "started")
            os.kill(os.getpid(), signal.SIGHUP)
            await exists(tmp_path / "started.signal")
            await running.end()
            agent.cancel()
            await asyncio.wait({agent})

    try:
        asyncio.run(check())
    finally:
        signal.signal(signal.SIGHUP, former)
    assert (tmp_path / "started.signal").read_text() == str(int(signal.SIGTERM))
