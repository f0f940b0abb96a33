"""Runs on true Ray: a cluster of three virtual nodes, whose processes and nodes are killed.

A node is a process namespace (which needs root): killing it kills all that it ever started, as a power failure does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import Needs, ProcessEnd, ProcessSpecification
from areal_core.launchers.identity import processes_with
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials
from areal_core.testing.conformance import LauncherSuite

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-ray[ray]'")
from areal_ray.config import RaySettings
from areal_ray.launcher import RayLauncher

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RayCluster, Workplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="virtual nodes are process namespaces: they need Linux, root and unshare",
    ),
]
HANG_S = 300
SHOW = "env; echo niceness $(nice)"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S} s: {what}"
        time.sleep(0.05)


class Run:
    """The supervisor's side of a launcher."""

    def __init__(self, cluster: RayCluster, folder: Path, **settings: object) -> None:
        self.launcher = RayLauncher(RaySettings(address=cluster.address, host=cluster.host, **settings))
        self.credentials = Credentials.create(1)
        self.folder = folder
        self.ends: dict[str, ProcessEnd] = {}
        self.said: list[str] = []
        self.is_unconfirmed = False
        self.wardens = Wardens(
            self.credentials,
            on_message=lambda *_: None,
            on_end=lambda process, end: self.ends.setdefault(process.name, end),
            on_notice=lambda *_: None,
            on_visitor=self._visit,
        )

    async def _visit(self, channel) -> None:
        await channel.receive()

    async def __aenter__(self) -> Self:
        try:
            await self.wardens.listen(await asyncio.to_thread(getattr, self.launcher, "host"))
            await self.wardens.bring(self.launcher, self.said.append, self.folder)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.wardens.close()
        await asyncio.to_thread(self.launcher.close)
        assert self.is_unconfirmed or not self.left(), "the end is confirmed"

    def left(self) -> list[int]:
        """Processes on any node."""
        return processes_with("AREAL_TOKEN", self.credentials.token)

    async def shown_on(self, node: str, **needs: object) -> str:
        """What a process sees there."""
        command = ["sh", "-c", SHOW]
        process = self.wardens.start(
            ProcessSpecification(f"show-{node}", "test", command, node=node, needs=Needs(**needs)),
            self.folder / f"{node}.log",
        )
        await process.wait()
        return (self.folder / f"{node}.log").read_text()


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, HANG_S))


def test_nodes_come_with_names_gpus_and_without_what_ray_sets_and_a_second_time(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MINE", "passed on")
    monkeypatch.setenv("OTHER_MINE", "kept here")

    async def work(excluded: str, first: str, expected: list[str]) -> None:
        settings = {"gpus_per_node": 2, "excluded_nodes": [excluded], "nodes": len(expected)}
        more = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "7"}}} if len(expected) == 1 else {}
        async with Run(cluster, tmp_path, **settings, **more) as running:
            assert sorted(running.wardens.nodes) == expected
            shown = await running.shown_on(first, gpus=(1,))
            assert {"CUDA_VISIBLE_DEVICES=1", f"AREAL_NODE={first}", "HF_MINE=passed on", "niceness 0"} <= set(
                shown.splitlines()
            )
            assert ("OMP_NUM_THREADS=7" in shown) is bool(more)
            assert "OTHER_MINE" not in shown
            assert not re.search("^(RAY_|OMP_NUM_THREADS=1|PYTHONBREAKPOINT)", shown, re.M)

    run(work("nowhere", "n1", ["n1", "n2"]))
    run(work("n1", "n2", ["n2"]))


def test_nodes_without_gpus_for_the_run_show_none_and_several_on_one_machine_are_numbered(
    cluster: RayCluster, tmp_path: Path
) -> None:
    async def work() -> None:
        settings = {"nodes": 2, "strategy": "PACK", "excluded_nodes": ["n0", "n1"]}
        async with Run(cluster, tmp_path, **settings) as running:
            assert sorted(running.wardens.nodes) == ["n2-0", "n2-1"]
            assert "CUDA_VISIBLE_DEVICES=\n" in await running.shown_on("n2-1")

    run(work())


def test_what_cannot_be_had_is_refused_with_what_there_is(cluster: RayCluster, tmp_path: Path) -> None:
    async def bring(**settings: object) -> None:
        async with Run(cluster, tmp_path, **settings):
            pass

    with pytest.raises(RunError, match=r"no room for 2 nodes with \{'CPU': 1.0, 'GPU': 3.0\}.* n1: 4 CPU, 2 GPU; n2"):
        run(bring(nodes=2, gpus_per_node=3, placement_timeout_s=2))
    with pytest.raises(RunError, match=r"no room for 3 nodes"):
        run(bring(nodes=3, excluded_nodes=["n1"], placement_timeout_s=2))
    nowhere = RayLauncher(RaySettings(address=f"{cluster.host}:1", host=cluster.host))
    with pytest.raises(RunError, match=f"at {cluster.host}:1 cannot be reached"):
        nowhere.host  # noqa: B018 - it asks
    nowhere.close()


@pytest.mark.parametrize("victim", ["actor", "driver", "program"])
def test_a_node_whose_warden_ends_or_never_begins_is_lost_by_name(
    cluster: RayCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], victim: str
) -> None:
    async def work() -> None:
        running = Run(cluster, tmp_path, excluded_nodes=["n0", "n2"])
        if victim == "program":
            await asyncio.to_thread(running.launcher.bring, ["/no/such/python"], {})
        else:
            await running.__aenter__()
            words = "ray::WardenActor" if victim == "actor" else "areal_ray.driver"
            started = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=True).stdout
            mine = {int(pid) for pid in started.split()}
            for pid in mine & ({*_session(cluster)} if victim == "actor" else {*_children(os.getpid())}):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + HANG_S
        while "n1" not in running.launcher.lost() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        expected = {"actor": "its actor is gone", "driver": "was killed by SIGKILL", "program": "there is no program"}
        assert expected[victim] in running.launcher.lost()["n1"]
        while running.wardens.nodes and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not running.wardens.nodes, "the warden has ended"
        running.is_unconfirmed = victim == "driver"
        await running.__aexit__()
        wait_until(lambda: not running.left(), "nothing is left")

    run(work())
    said = capfd.readouterr().err
    assert ("the end of its nodes is not confirmed" in said) is (victim == "driver")


def _children(pid: int) -> list[int]:
    own: list[int] = []
    with suppress(FileNotFoundError):  # the process ends, and before it its threads
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                own += map(int, (task / "children").read_text().split())
    return own + [deeper for child in own for deeper in _children(child)]


def _session(cluster: RayCluster) -> list[int]:
    return [pid for node in cluster.nodes.values() for pid in _children(node.pid)]


class TestConformance(LauncherSuite):
    """The suite, on two nodes of the cluster."""

    cluster: ClassVar[RayCluster]

    @pytest.fixture(autouse=True)
    def _use(self, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TestConformance, "cluster", cluster, raising=False)

    def make(self) -> RayLauncher:
        settings = {"nodes": 2, "excluded_nodes": ["n0"], "address": self.cluster.address, "host": self.cluster.host}
        return RayLauncher(RaySettings(**settings))


def run_words(cluster: RayCluster, nodes: int = 2) -> list[str]:
    """`areal run`, on the cluster."""
    return ["run", "run.yaml", "run_dir=run", f"launcher.address={cluster.address}", f"launcher.host={cluster.host}",
            "launcher.type=ray", f"launcher.nodes={nodes}", "launcher.trainer_processes=2"]  # fmt: skip


def named(run_dir: Path) -> dict[str, int]:
    """The processes of a run's present epoch by name."""
    found: dict[str, int] = {}
    for pid in processes_with("AREAL_TOKEN", token_of(run_dir)):
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            for entry in variables:
                if entry.startswith("AREAL_PROCESS=") and "keeper.py" not in command:
                    found[entry.partition("=")[2]] = pid
    return found


def start(workplace: Workplace, cluster: RayCluster, *words: str) -> tuple[subprocess.Popen[str], Path]:
    """A run on the cluster, and where it writes."""
    out = workplace.folder / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [*workplace.command, *words],
            cwd=workplace.folder, env={**workplace.environment, **cluster.environment}, stdout=file, stderr=file,
            text=True,
        )  # fmt: skip
    return process, out


def test_a_run_that_loses_a_process_and_then_a_node_goes_back_to_its_checkpoint_and_ends_well(
    cluster: RayCluster, workplace: Workplace
) -> None:
    words = [*run_words(cluster), "steps=60", "checkpoint.every=2", "launcher.placement_timeout_s=240"]
    process, out = start(workplace, cluster, *words)
    run_dir = workplace.folder / "run"
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    os.kill(named(run_dir)["trainer-1"], signal.SIGKILL)
    workplace.wait_for(lambda: "1 of at most 3 times" in out.read_text(), process)
    assert "trainer-1 on " in out.read_text()
    assert "was killed by SIGKILL" in out.read_text()
    before = len(workplace.metrics())
    workplace.wait_for(lambda: len(workplace.metrics()) >= before + 3, process)
    lost = next(name for name in ("n2", "n1") if node_of(cluster, name) & {*named(run_dir).values()})
    cluster.kill(lost)
    workplace.wait_for(lambda: "2 of at most 3 times" in out.read_text(), process)
    assert f"on {lost} was lost with its node" in out.read_text()
    assert process.wait(2 * HANG_S) == 0, out.read_text()
    assert workplace.metrics()[-1]["step"] == 60
    assert workplace.areal("audit", "run").code == 0
    assert processes_with("AREAL_TOKEN", token_of(run_dir)) == []


@pytest.mark.long
def test_nothing_is_left_of_a_run_whose_parent_is_killed_and_it_is_resumed(
    cluster: RayCluster, workplace: Workplace
) -> None:
    process, out = start(workplace, cluster, *run_words(cluster), "steps=400", "checkpoint.every=2")
    run_dir = workplace.folder / "run"
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    token, driver = token_of(run_dir), _children(process.pid)
    assert len(processes_with("AREAL_TOKEN", token)) >= 5, "two wardens, two ranks, a controller"
    process.kill()
    process.wait()
    wait_until(lambda: processes_with("AREAL_TOKEN", token) == [], "no process is left on any node")
    wait_until(lambda: not [pid for pid in driver if Path(f"/proc/{pid}").exists()], "nor here")
    more = [f"steps={len(workplace.metrics()) + 3}", "launcher.nodes=1"]
    resumed, out = start(workplace, cluster, "run", "--resume", "run", *more)
    assert resumed.wait(2 * HANG_S) == 0, out.read_text()
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.long
def test_a_job_is_submitted_followed_and_stopped_after_a_checkpoint(cluster: RayCluster, workplace: Workplace) -> None:
    environment = {**workplace.environment, **cluster.environment}
    jobs = ["--jobs-address", cluster.jobs]
    words = [*run_words(cluster)[1:], "steps=4000", "--plugins", "ray"]
    submit = [*workplace.command, "ray", "submit", *jobs]
    submitted = subprocess.run(
        [*submit, *words], cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert submitted.returncode == 0, submitted.stderr
    name = submitted.stdout.split()[2]

    def told(command: str) -> str:
        """What a command that `areal ray submit` has printed says."""
        (line,) = [line for line in submitted.stdout.splitlines() if f"ray job {command}" in line]
        words = line[line.index("ray job") :].replace("--follow ", "").split()[1:]
        ray = [sys.executable, "-m", "ray.scripts.scripts", *words]
        done = subprocess.run(ray, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    wait_until(lambda: len(workplace.metrics()) >= 2 or "failed" in told("status"), "it trains")
    assert workplace.metrics(), told("logs")
    assert "run folder: " in told("logs")
    assert name in told("stop")
    wait_until(lambda: "stopped after a checkpoint" in told("logs"), "it has stopped in order")
    again = subprocess.run(
        [*submit, *words], cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "areal ray submit --resume" in again.stderr
    done = len(workplace.metrics())
    submitted = subprocess.run(
        [*submit, "--resume", "run", f"steps={done + 3}"],
        cwd=workplace.folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: re.search("succeeded|failed", told("status")), "the resumed job has ended")
    assert len(workplace.metrics()) == done + 3, told("logs")


@pytest.mark.long
def test_a_cluster_of_this_machine_alone_begins_and_ends_with_the_run(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "launcher.type=ray", "launcher.address=null")
    assert done.code == 0, done.err
    assert processes_with("AREAL_CACHE", workplace.environment["AREAL_CACHE"]) == []
    assert workplace.areal("audit", "run").code == 0


def node_of(cluster: RayCluster, name: str) -> set[int]:
    """All processes of a node."""
    return {*_children(cluster.nodes[name].pid)}


def token_of(run_dir: Path) -> str:
    """Which the processes of a run's present epoch have in their environment."""
    return (max((run_dir / "epochs").iterdir(), key=lambda path: path.name) / "token").read_text()


def test_a_node_that_the_cluster_has_later_joins_the_run_and_goes_without_stopping_it(
    cluster: RayCluster, workplace: Workplace
) -> None:
    """As an autoscaler would have it; what runs there is for servers to say."""
    cluster.kill("n2")
    words = [*run_words(cluster, 1), "launcher.maximum_nodes=2", "launcher.gpus_per_node=1", "steps=100000"]
    process, out = start(workplace, cluster, *words)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    assert "has come" not in out.read_text()
    cluster.repair()
    workplace.wait_for(lambda: "the node n2 has come, with 1 GPUs" in out.read_text(), process)
    assert [*json.loads(workplace.areal("status", "run", "--json").out)["nodes"]].count("n2") == 1
    cluster.kill("n2")
    workplace.wait_for(lambda: "the node n2 is lost, and with it: nothing" in out.read_text(), process)
    done = len(workplace.metrics())
    workplace.wait_for(lambda: len(workplace.metrics()) >= done + 2, process)
    assert "going back" not in out.read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 130, out.read_text()
    assert workplace.areal("audit", "run").code == 0
    assert processes_with("AREAL_TOKEN", token_of(workplace.folder / "run")) == []
