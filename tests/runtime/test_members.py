"""Members of process groups: their places and environment variables."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.interfaces.launcher import Node, OnExit, Place, ProcessEnd, ProcessGroup
from areal_core.runtime.environment import NODES_VARIABLE, START_VARIABLE
from areal_core.runtime.hub import Hub
from areal_core.runtime.members import Members, variables_of
from areal_core.runtime.rpc import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@pytest.mark.parametrize(
    ("places", "local"),
    [
        ({0: Place("a", (0,)), 1: Place("a", (1,)), 2: Place("b", (0,))}, ["0", "0", "0"]),  # each sees its own alone
        ({0: Place("a"), 1: Place("a"), 2: Place("b")}, ["0", "1", "0"]),
    ],
)
def test_a_local_rank_is_the_number_of_a_gpu_that_the_rank_sees(places: dict[int, Place], local: list[str]) -> None:
    group = ProcessGroup("trainer", "trainer", ["-"], count=3)
    variables = [variables_of(group, index, places, node_count=2) for index in places]
    assert [rank["LOCAL_RANK"] for rank in variables] == local
    assert [rank["RANK"] for rank in variables] == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in variables} == {"3"}


class Recording:
    """A launcher of two nodes that records what it starts."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.starts: list[tuple[str, dict[int, Place], str]] = []

    async def nodes(self, groups: Sequence[ProcessGroup]) -> list[Node]:
        return [Node("a", "a", 2), Node("b", "b", 2)]

    async def start(
        self, group: ProcessGroup, places: Mapping[int, Place], environment: Mapping[str, str]
    ) -> NeverEnding:
        self.starts.append((group.name, dict(places), group.environment[START_VARIABLE]))
        return NeverEnding()

    async def close(self) -> None:
        pass


class NeverEnding:
    async def wait(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def end(self) -> None:
        pass


def members_of(launcher: Recording, folder: Path) -> tuple[Members, Hub]:
    hub = Hub(
        Credentials.create(1), on_message=lambda *_: None, on_end=lambda _: None, on_node=None,
        on_client=lambda _: asyncio.sleep(0),
    )  # fmt: skip
    return Members(launcher, hub, lambda name: folder / f"{name}.log", lambda _: None), hub


TRAINER = ProcessGroup("trainer", "trainer", ["-"], count=2, gpus_each=1)


def server(number: int, **fields: Any) -> ProcessGroup:
    return ProcessGroup(f"server-{number}", "server", ["-"], gpus_each=1, on_exit=OnExit.RESTART, **fields)


def test_every_member_knows_that_the_run_has_several_nodes_also_if_its_group_has_one(tmp_path: Path) -> None:
    async def check() -> None:
        members, hub = members_of(Recording(), tmp_path)
        await members.start([TRAINER, server(0)])
        nodes = {process.name: process.place.node for process in hub.processes.values()}
        assert nodes == {"trainer-0": "a", "trainer-1": "a", "server-0": "b"}
        assert {process.environment[NODES_VARIABLE] for process in hub.processes.values()} == {"2"}

    asyncio.run(check())


def test_servers_that_wait_for_the_trainers_turn_get_gpus_of_their_own(tmp_path: Path) -> None:
    async def check() -> None:
        launcher = Recording()
        members, hub = members_of(launcher, tmp_path)
        members.may_use_shared_gpus.clear()
        await members.start([], [server(number, shares_gpus=True) for number in range(2)])
        await asyncio.sleep(0.05)
        assert not hub.processes
        members.may_use_shared_gpus.set()
        while len(launcher.starts) < 2:
            await asyncio.sleep(0.01)
        assert [places[0] for _, places, _ in launcher.starts] == [Place("a", (0,)), Place("a", (1,))]
        assert launcher.starts[0][2] != launcher.starts[1][2]

    asyncio.run(check())


def test_a_trainer_gets_the_gpus_of_servers_that_stayed_from_the_attempt_before(tmp_path: Path) -> None:
    async def check() -> None:
        members, hub = members_of(Recording(), tmp_path)
        servers = [server(number, shares_gpus=True) for number in range(4)]
        await members.start([*servers, TRAINER])
        for process in list(hub.processes.values()):
            process.is_ready = process.group.is_server
        await members.end(lambda group: group.is_server)
        await members.start([*servers, TRAINER])
        assert {process.name for process in hub.processes.values()} >= {"trainer-0", "trainer-1", "server-3"}

    asyncio.run(check())


def test_a_member_whose_node_is_gone_gets_a_place_beside_those_that_run(tmp_path: Path) -> None:
    async def check() -> None:
        launcher = Recording()
        members, hub = members_of(launcher, tmp_path)
        await members.start([ProcessGroup("worker", "worker", ["-"], count=4, gpus_each=1, on_exit=OnExit.RESTART)])
        lost = hub.processes["worker", 3]
        hub.remove(lost, ProcessEnd(None))
        lost.place = Place("gone", (0,))
        members.restart(lost, 0.0)
        async with asyncio.timeout(30):
            while len(launcher.starts) < 2:
                await asyncio.sleep(0.01)
        assert launcher.starts[1][1] == {3: Place("b", (1,))}

    asyncio.run(check())


def test_one_member_of_a_group_is_started_again_at_its_own_place(tmp_path: Path) -> None:
    async def check() -> None:
        launcher = Recording()
        members, hub = members_of(launcher, tmp_path)
        await members.start([ProcessGroup("worker", "worker", ["-"], count=2, on_exit=OnExit.RESTART)])
        lost = hub.processes["worker", 1]
        hub.remove(lost, ProcessEnd(1))
        members.restart(lost, 0.0)
        while len(launcher.starts) < 2:
            await asyncio.sleep(0.01)
        assert launcher.starts[1][1] == {1: lost.place}
        assert hub.processes["worker", 1].start != lost.start

    asyncio.run(check())
