"""Runs on true Ray: a cluster of three virtual nodes, whose processes and nodes are killed.

A node is a process namespace (which needs root): killing it kills all that it ever started, as a power failure does.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import OnExit, Place, ProcessGroup
from areal_testing.conformance import LauncherSuite
from areal_testing.conformance.launchers import Session, driven

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-ray[ray]'")
import ray

from areal_ray.config import RaySettings
from areal_ray.launcher import RayLauncher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import RayCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="virtual nodes are process namespaces: they need Linux, root and unshare",
    ),
]
HANG_S = 300
REPAIRER = ThreadPoolExecutor(1)
"""Nodes die with the thread that has started them."""
VARIABLES = "CUDA_VISIBLE_DEVICES|(HF|OTHER)_MINE|RAY_.*|OMP_NUM_THREADS|PYTHONBREAKPOINT|MORE"
SHOW = ["sh", "-c", f"env | grep -E '^({VARIABLES})='; echo niceness $(nice)"]


def make(cluster: RayCluster, **settings: object) -> RayLauncher:
    return RayLauncher(RaySettings(address=cluster.address, host=cluster.host, **settings))


@asynccontextmanager
async def launched(cluster: RayCluster, **settings: object) -> AsyncIterator[RayLauncher]:
    """A launcher that has reached the cluster."""
    launcher = make(cluster, **settings)
    try:
        assert await asyncio.to_thread(getattr, launcher, "host") == cluster.host
        yield launcher
    finally:
        await launcher.close()


@asynccontextmanager
async def driven_by_ray(cluster: RayCluster, folder: Path, **settings: object) -> AsyncIterator[Session]:
    """A driver with that launcher, which leaves no process."""
    async with driven(make(cluster, **settings), folder / "run", HANG_S) as session:
        yield session
    session.assert_no_process_remains()


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, HANG_S))


def test_members_have_gpus_of_ray_and_nothing_else_that_it_sets(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MINE", "passed on")
    monkeypatch.setenv("OTHER_MINE", "kept here")

    async def work(gpus: int, excluded: list[str], expected: list[str], shown: set[str], **more: object) -> None:
        async with launched(cluster, excluded_nodes=[*excluded, "nowhere"], **more) as launcher:
            group = ProcessGroup("shown", "test", SHOW, gpus_each=gpus)
            nodes = await launcher.nodes([group])
            assert [own_name(node.name) for node in nodes] == expected
            assert nodes[0].gpus == gpus
            running = await launcher.start(group, {0: Place(nodes[0].name, tuple(range(gpus)))}, {})
            _, *lines = (await running.wait()).replace("exit code 0 ", "exit code 0\n").splitlines()
            assert {*lines} == {*shown, "HF_MINE=passed on", "niceness 0"}

    run(work(2, ["n1"], ["n2"], {"CUDA_VISIBLE_DEVICES=0,1"}))
    more = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "7"}}, "labels": {"ray.io/node-group": "!in(no)"}}
    run(work(0, ["n0", "n2"], ["n1"], {"CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=7"}, nodes=1, **more))


def test_groups_that_take_turns_have_the_same_gpus_and_others_their_own(cluster: RayCluster) -> None:
    async def work() -> None:
        ranks = ProcessGroup("trainer", "trainer", SHOW, count=2, gpus_each=1)
        turns = ProcessGroup("server-0", "server", SHOW, gpus_each=2, shares_gpus=True)
        async with launched(cluster) as launcher:
            assert [node.gpus for node in await launcher.nodes([ranks, turns])] == [2]
            other = ProcessGroup("server-1", "server", SHOW, gpus_each=1)
            assert len(await launcher.nodes([ProcessGroup("model", "model", SHOW)])) == 1
            assert sorted(node.gpus for node in await launcher.nodes([ranks, turns, other])) == [1, 2]
        async with launched(cluster, nodes=2) as launcher:
            assert [node.gpus for node in await launcher.nodes([ranks, other])] == [2, 2]

    run(work())


def test_what_cannot_be_had_is_refused_with_what_there_is(cluster: RayCluster) -> None:
    async def ask(gpus: int, **settings: object) -> None:
        async with launched(cluster, placement_timeout_s=2, **settings) as launcher:
            await launcher.nodes([ProcessGroup("trainer", "trainer", SHOW, count=2, gpus_each=gpus)])

    with pytest.raises(RunError, match=r"no room for 2 x \{'CPU': 1.0, 'GPU': 3.0\}.* n1: 4 CPU, 2 GPU; n2"):
        run(ask(3))
    with pytest.raises(RunError, match=r"no room for 3 x"):
        run(ask(0, nodes=3, excluded_nodes=["n1"]))
    nowhere = RayLauncher(RaySettings(address=f"{cluster.host}:1", host=cluster.host))
    with pytest.raises(RunError, match=f"at {cluster.host}:1 cannot be reached"):
        nowhere.host  # noqa: B018 - it asks
    run(nowhere.close())


def test_signals_of_the_driver_are_its_own_and_actors_are_seen_by_name(cluster: RayCluster, tmp_path: Path) -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]

    async def work() -> None:
        heard: list[int] = []
        async with launched(cluster) as launcher:
            for number in numbers:  # as the driver does, when the launcher has its address
                asyncio.get_running_loop().add_signal_handler(number, heard.append, number)
            group = ProcessGroup("gang", "gang", ["sleep", "600"], count=2)
            (node, *_) = await launcher.nodes([group])
            running = await launcher.start(group, {index: Place(node.name) for index in range(2)}, {})
            for number in numbers * 2:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)
            assert heard == numbers * 2
            names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
            assert names == {"areal/run/1-gang-0", "areal/run/2-gang-1"}
            while sum(cmdline(pid).startswith(b"sleep\x00600") for pid in processes_of(cluster)) < 2:
                await asyncio.sleep(0.05)
            await running.end()
            while any(cmdline(pid).startswith(b"sleep\x00600") for pid in processes_of(cluster)):
                await asyncio.sleep(0.05)

    run(work())


@pytest.mark.parametrize("victim", ["actor", "program"])
def test_how_a_member_has_ended_is_told(cluster: RayCluster, victim: str) -> None:
    async def work() -> None:
        async with launched(cluster) as launcher:
            command = ["/no/such/program"] if victim == "program" else ["sleep", "601"]
            group = ProcessGroup("lone", "lone", command)
            (node, *_) = await launcher.nodes([group])
            running = await launcher.start(group, {0: Place(node.name)}, {})
            if victim == "actor":
                while not (found := [pid for pid in processes_of(cluster) if b"setsid\0" in cmdline(pid)]):
                    await asyncio.sleep(0.05)
                os.kill(int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
            told = {"actor": "lone The actor died", "program": "/no/such/program"}
            assert told[victim] in await running.wait()
            await running.end()

    run(work())
    for pid in processes_of(cluster):  # what a guard would have ended
        if b"sleep\x00601" in cmdline(pid):
            os.kill(pid, signal.SIGKILL)


def own_name(node: str) -> str:
    """Of a node, without its address."""
    return node.partition(" (")[0]


def cmdline(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def processes_of(cluster: RayCluster) -> list[int]:
    return [pid for name in cluster.nodes for pid in cluster.processes(name)]


@pytest.mark.nightly
def test_what_a_lost_node_had_is_placed_anew_and_who_survives_keeps_its_gpus(
    cluster: RayCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with driven_by_ray(cluster, tmp_path, placement_timeout_s=HANG_S) as session:
            gang = session.group("gang", count=1, gpus_each=1)
            server = session.group("server-0", gpus_each=2, on_exit=OnExit.RESTART)
            await session.driver.start([gang, server])
            first, second = await session.report_of("gang"), await session.report_of("server-0")
            began = time.monotonic()
            cluster.kill(own_name(first["node"]))
            with pytest.raises(LostError):
                await session.driver.watch("gang", lambda: None)
            noticed = time.monotonic()
            await session.driver.end_attempt(keeps=lambda group: group.name == "server-0")
            (session.folder / "gang.json").unlink()
            starting = asyncio.ensure_future(session.driver.start([gang, server]))  # no node has room until then
            await asyncio.sleep(1)
            assert not starting.done()
            await asyncio.get_running_loop().run_in_executor(REPAIRER, cluster.repair)
            await starting
            assert (await session.report_of("gang"))["node"] != second["node"]
            assert session.processes()["server-0"].gpus == (0, 1)
            assert (await session.report_of("server-0"))["pid"] == second["pid"]
            print(f"noticed after {noticed - began:.2f} s")

    run(work())
    assert re.search("waiting for room in the Ray cluster for 1 x .*'GPU': 1.0.*, since .* s", capfd.readouterr().err)


@pytest.mark.nightly
def test_gpus_keep_their_numbers_where_those_of_a_lost_node_come_to_them(cluster: RayCluster) -> None:
    async def work() -> None:
        async with launched(cluster, strategy="SPREAD") as launcher:
            gang = ProcessGroup("trainer", "trainer", SHOW, count=2, gpus_each=1)
            while ray.available_resources().get("GPU") != 4:  # SPREAD takes one node where the other is not free yet
                await asyncio.sleep(0.1)
            nodes = await launcher.nodes([gang])
            assert [node.gpus for node in nodes] == [1, 1]
            cluster.kill(own_name(nodes[0].name))
            assert await launcher.nodes([gang]) == [nodes[1]._replace(gpus=2)]
            running = await launcher.start(gang, {0: Place(nodes[1].name, (1,))}, {})
            assert "CUDA_VISIBLE_DEVICES=0,1" in await running.wait()  # the first bundle, which has come, has GPU 1

    run(work())


@pytest.mark.nightly
def test_where_ray_has_given_up_a_node_that_hangs_it_is_asked_anew(
    cluster: RayCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray notices after 65 s, and leaves a task that it has sent there where it is."""

    async def work() -> None:
        async with launched(cluster) as launcher:
            group = ProcessGroup("gang", "gang", SHOW, gpus_each=1)
            (node,) = await launcher.nodes([group])
            for pid in cluster.processes(own_name(node.name)):
                if b"/raylet\0" in cmdline(pid):
                    os.kill(pid, signal.SIGSTOP)
            (other,) = await launcher.nodes([group])
            assert {own_name(node.name), own_name(other.name)} == {"n1", "n2"}
            cluster.kill(own_name(node.name))

    run(work())
    assert re.search(r"1 x .*'GPU': 1.0} \(n[12] .* does not answer", capfd.readouterr().err)


@pytest.mark.nightly
def test_room_for_one_more_is_asked_for_and_comes_with_a_node(cluster: RayCluster) -> None:
    """As an autoscaler would have it."""
    cluster.kill("n2")

    async def work() -> None:
        async with launched(cluster) as launcher:
            gang = ProcessGroup("trainer", "trainer", SHOW, count=2, gpus_each=1)
            more = ProcessGroup("server-3", "server", SHOW, gpus_each=2)
            assert [own_name(node.name) for node in await launcher.nodes([gang])] == ["n1"]
            assert not await launcher.request(more)
            assert not await launcher.request(more)
            await asyncio.get_running_loop().run_in_executor(REPAIRER, cluster.repair)
            while not await launcher.request(more):
                await asyncio.sleep(0.1)
            nodes = await launcher.nodes([gang])
            assert [(own_name(node.name), node.gpus) for node in nodes] == [("n1", 2), ("n2", 2)]
            cluster.kill("n2")
            await asyncio.sleep(1)  # the last of its processes may have lived to answer
            assert [own_name(node.name) for node in await launcher.nodes([gang, more])] == ["n1"]
            assert not await launcher.request(more)  # Ray looks for its room, which is not asked for twice
            rooms = ray.util.placement_group_table().values()
            assert sum(room["state"] != "REMOVED" for room in rooms) == 2

    run(work())


class TestConformance(LauncherSuite):
    """The suite, on two nodes of the cluster."""

    nodes: ClassVar[int] = 2
    cluster: ClassVar[RayCluster]

    @pytest.fixture(autouse=True)
    def _use(self, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TestConformance, "cluster", cluster, raising=False)

    def make(self) -> RayLauncher:
        return make(self.cluster, nodes=2, excluded_nodes=["n0"])
