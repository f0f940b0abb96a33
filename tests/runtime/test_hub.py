"""The hub: which processes may join, what it learns of those that never do, and who is notified of addresses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.runtime.hub import Hub, Process
from areal_core.runtime.messages import Announce, ExitReport, Join, Joined, Lookup, RoleMembers, Watch
from areal_core.runtime.rpc import Credentials, Failed, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from areal_core.runtime.rpc import Peer

LIMIT_S = 30.0
REFUSED = "the launcher of this run accepts no machines"


class World:
    """A hub that waits for two ranks and a server."""

    def __init__(self, folder: Path, on_node: Callable[[Peer], Awaitable[None]] | None = None) -> None:
        self.credentials = Credentials.create(3)
        self.ended: list[Process] = []
        self.hub = Hub(
            self.credentials,
            on_message=lambda *_: None,
            on_end=self.ended.append,
            on_node=on_node,
            on_client=self._serve_client,
        )
        trainer, server = ProcessGroup("trainer", "trainer", ["-"], count=2), ProcessGroup("server-0", "server", ["-"])
        self.ranks = [self._add(trainer, index, folder) for index in range(2)]
        self.server = self._add(server, 0, folder)

    def _add(self, group: ProcessGroup, index: int, folder: Path) -> Process:
        process = Process(group, index, Place("here"), 3, {"SAID": "so"}, folder / f"{group.member(index)}.log")
        self.hub.add(process)
        return process

    async def _serve_client(self, peer: Peer) -> None:
        raise AssertionError(peer.name)

    async def join(self, group: str, index: int = 0, *, sees_run: bool = True) -> Peer:
        """A process joins; its connection."""
        peer = await connect(self.hub.address, LIMIT_S, "member", self.credentials)
        answer = await peer.request(Join(group, index, "here", 7, sees_run), LIMIT_S, "a place")
        assert answer == Joined({"SAID": "so"})
        return peer


@asynccontextmanager
async def world(folder: Path, on_node: Callable[[Peer], Awaitable[None]] | None = None) -> AsyncIterator[World]:
    made = World(folder, on_node)
    await made.hub.listen("127.0.0.1")
    async with asyncio.timeout(LIMIT_S):
        yield made


def test_a_rank_that_does_not_see_the_run_ends_immediately_although_the_other_has_joined(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.join("trainer", 0)
            with pytest.raises(RunError, match="does not see the run folder"):
                await at.join("trainer", 1, sees_run=False)
            assert at.ended == [at.ranks[1]]
            assert at.ranks[1].end_reason.startswith("here: its machine does not see")
            assert not at.ranks[0].ended.done()

    asyncio.run(check())


def test_the_guard_reports_the_exit_of_a_process_that_died_before_it_joined(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            at.ranks[1].log.write_text("no module named torch\n")
            guard = await connect(at.hub.address, LIMIT_S, "guard", at.credentials)
            await guard.request(ExitReport("trainer", 1, 0, 1), LIMIT_S, "a receipt")
            end = at.ranks[1].ended.result()
            assert (end.code, end.last_words) == (1, "no module named torch")
            assert at.ended == [at.ranks[1]]

    asyncio.run(check())


def test_a_report_about_another_start_of_a_member_is_ignored(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.join("trainer", 0)
            former = Credentials(at.credentials.token, 2)
            for credentials, rank in ((at.credentials, 0), (former, 1)):  # one has joined, one has not
                guard = await connect(at.hub.address, LIMIT_S, "guard", credentials)
                await guard.request(ExitReport("trainer", rank, 8, -9), LIMIT_S, "a receipt")
                assert at.ranks[rank].code is None
            assert at.ended == []

    asyncio.run(check())


def test_a_process_of_an_earlier_start_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            peer = await connect(at.hub.address, LIMIT_S, "member", at.credentials)
            with pytest.raises(RunError, match="is not expected"):
                await peer.request(Join("trainer", 0, "here", 7, sees_run=True, start=8), LIMIT_S, "a place")
            assert at.ranks[0].join is None

    asyncio.run(check())


def test_a_process_watches_several_roles(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            rank = await at.join("trainer", 0)
            for role in ("server", "worker"):
                rank.notify(Watch(role))
                assert (await _servers(rank)).role == role
            assert at.hub.is_watched("server")
            assert at.hub.is_watched("worker")

    asyncio.run(check())


def test_a_process_that_is_not_expected_or_has_joined_before_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            await at.join("trainer", 0)
            for group in ("trainer", "stranger"):
                with pytest.raises(RunError, match="is not expected"):
                    await at.join(group, 0)
            assert at.ended == []

    asyncio.run(check())


def test_a_process_of_a_former_attempt_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            former = Credentials(at.credentials.token, 2)
            peer = await connect(at.hub.address, LIMIT_S, "member", former)
            joining = peer.request(Join("trainer", 0, "here", 7, sees_run=True), LIMIT_S, "a place")
            with pytest.raises(RunError):
                await joining
            assert at.ranks[0].join is None

    asyncio.run(check())


def test_a_machine_reaches_the_launcher_also_with_a_former_attempt_or_is_refused(tmp_path: Path) -> None:
    async def accept(peer: Peer) -> None:
        peer.notify(Announce("accepted", peer.name))
        await peer.receive()

    async def check() -> None:
        for on_node, answer in ((accept, Announce("accepted", "node")), (None, Failed(REFUSED))):
            async with world(tmp_path, on_node) as at:
                for attempt in (2, 3):
                    machine = await connect(at.hub.address, LIMIT_S, "node", Credentials(at.credentials.token, attempt))
                    assert await machine.receive() == answer
                    await machine.close()

    asyncio.run(check())


def test_an_early_question_waits_for_its_address_and_watchers_are_notified_of_ends(tmp_path: Path) -> None:
    async def check() -> None:
        async with world(tmp_path) as at:
            rank = await at.join("trainer", 0)
            asking = asyncio.ensure_future(rank.request(Lookup("server"), LIMIT_S, "a server"))
            rank.notify(Watch("server"))
            assert (await _servers(rank)).serving == ()
            server = await at.join("server-0")
            server.notify(Announce("server", "http://there"))
            assert await asking == Announce("server", "http://there")
            (serving,) = (await _servers(rank)).serving
            assert (serving.name, serving.address, serving.is_fresh) == ("server-0", "http://there", True)
            await server.close()
            assert (await _servers(rank)).serving == ()
            assert at.ended == [at.server]

    asyncio.run(check())


async def _servers(peer: Peer) -> RoleMembers:
    message: Any = await peer.receive()
    assert isinstance(message, RoleMembers)
    return message
