"""The hub: who is let in, what becomes known of those that never come in, and who hears of whom."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.driver.hub import Hub, Process
from areal_core.errors import RunError
from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.messages import Credentials, connect
from areal_core.messages.hub import Announce, Ask, Ended, Join, Servers, Watch, Welcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from areal_core.messages import Peer

LIMIT_S = 30.0


class World:
    """A hub that waits for two ranks and a server."""

    def __init__(self, folder: Path) -> None:
        self.credentials = Credentials.create(3)
        self.ended: list[Process] = []
        self.hub = Hub(
            self.credentials,
            on_message=lambda *_: None,
            on_end=self.ended.append,
            on_node=None,
            on_visitor=self._visited,
        )
        trainer, server = ProcessGroup("trainer", "trainer", ["-"], count=2), ProcessGroup("server-0", "server", ["-"])
        self.ranks = [self._add(trainer, index, folder) for index in range(2)]
        self.server = self._add(server, 0, folder)

    def _add(self, group: ProcessGroup, index: int, folder: Path) -> Process:
        process = Process(group, index, Place("here"), 3, {"SAID": "so"}, folder / f"{group.member(index)}.log")
        self.hub.processes[process.key] = process
        return process

    async def _visited(self, peer: Peer) -> None:
        raise AssertionError(peer.name)

    async def come(self, group: str, index: int = 0, *, sees_run: bool = True) -> Peer:
        """A process joins; its connection."""
        peer = await connect(self.hub.address, LIMIT_S, "member", self.credentials)
        answer = await peer.request(Join(group, index, "here", 7, sees_run), LIMIT_S, "a place")
        assert answer == Welcome({"SAID": "so"})
        return peer


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    await made.hub.listen("127.0.0.1")
    async with asyncio.timeout(LIMIT_S):
        yield made


def test_one_rank_that_does_not_see_the_run_has_ended_at_once_though_the_other_is_there(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.come("trainer", 0)
            with pytest.raises(RunError, match="does not see the run folder"):
                await at.come("trainer", 1, sees_run=False)
            assert at.ended == [at.ranks[1]]
            assert at.ranks[1].why.startswith("here: its machine does not see")
            assert not at.ranks[0].ended.done()

    asyncio.run(check())


def test_of_a_process_that_died_before_it_came_the_guard_says_how(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            at.ranks[1].log.write_text("no module named torch\n")
            guard = await connect(at.hub.address, LIMIT_S, "guard", at.credentials)
            await guard.request(Ended("trainer", 1, 7, 1), LIMIT_S, "a receipt")
            end = at.ranks[1].ended.result()
            assert (end.code, end.last_words) == (1, "no module named torch")
            assert at.ended == [at.ranks[1]]

    asyncio.run(check())


def test_the_guard_of_another_process_of_this_name_says_nothing_of_this_one(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.come("trainer", 0)
            guard = await connect(at.hub.address, LIMIT_S, "guard", at.credentials)
            await guard.request(Ended("trainer", 0, 8, -9), LIMIT_S, "a receipt")
            assert at.ranks[0].code is None
            assert at.ended == []

    asyncio.run(check())


def test_nobody_comes_twice_and_nobody_whom_nobody_waits_for(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.come("trainer", 0)
            for group in ("trainer", "stranger"):
                with pytest.raises(RunError, match="is not expected"):
                    await at.come(group, 0)
            assert at.ended == []

    asyncio.run(check())


def test_a_former_attempt_is_not_let_in(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            former = Credentials(at.credentials.token, 2)
            peer = await connect(at.hub.address, LIMIT_S, "member", former)
            joining = peer.request(Join("trainer", 0, "here", 7, sees_run=True), LIMIT_S, "a place")
            with pytest.raises(RunError):
                await joining
            assert at.ranks[0].join is None

    asyncio.run(check())


def test_who_asks_early_is_answered_when_somebody_serves_and_watchers_hear_of_ends(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            rank = await at.come("trainer", 0)
            asking = asyncio.ensure_future(rank.request(Ask("server"), LIMIT_S, "a server"))
            rank.notify(Watch("server"))
            assert (await _servers(rank)).serving == ()
            server = await at.come("server-0")
            server.notify(Announce("server", "http://there"))
            assert await asking == Announce("server", "http://there")
            (serving,) = (await _servers(rank)).serving
            assert (serving.name, serving.address, serving.is_fresh) == ("server-0", "http://there", True)
            await server.close()
            assert (await _servers(rank)).serving == ()
            assert at.ended == [at.server]

    asyncio.run(check())


async def _servers(peer: Peer) -> Servers:
    message: Any = await peer.receive()
    assert isinstance(message, Servers)
    return message
