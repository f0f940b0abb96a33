"""Processes under keepers and wardens: started, signalled, ended whole, and never left behind by a kill of anybody."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest

from areal_core.errors import RunError
from areal_core.interfaces.launcher import LOST, EndMeans, Needs, ProcessEnd, ProcessSpecification
from areal_core.launchers import keeper as keeper_module
from areal_core.launchers import shared_folder
from areal_core.launchers.identity import has_ended, identify
from areal_core.launchers.keepers import Keepers
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials

pytestmark = pytest.mark.slow

HANG_S = 60
ORPHAN = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(sleep)
print("ready", flush=True)
time.sleep(600)
"""


def tagged(tag: str) -> list[int]:
    """Processes whose command line ends with a word, keepers left out."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 2 and words[-2] == tag.encode() and not any(b"keeper.py" in word for word in words):
            pids.append(int(path.parent.name))
    return pids


async def until(condition, what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S} s: {what}"
        await asyncio.sleep(0.02)


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def specification(name: str, code: str, *words: str, **more) -> ProcessSpecification:
    return ProcessSpecification(name, "test", [sys.executable, "-c", code, *words], **more)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * HANG_S))


@pytest.fixture
def tag(tmp_path: Path) -> str:
    return f"tag-{os.getpid()}-{tmp_path.name}"


class Run:
    """The supervisor's side, with one node on this machine."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.ends: dict[str, ProcessEnd] = {}
        self.notices: list[int] = []
        self.launcher = LocalLauncher(LocalSettings(nodes=nodes))
        self.wardens = Wardens(
            Credentials.create(1),
            on_message=lambda *_: None,
            on_end=lambda process, end: self.ends.setdefault(process.name, end),
            on_notice=lambda _, number: self.notices.append(number),
            on_visitor=self._visit,
        )

    async def _visit(self, channel) -> None:
        await channel.receive()

    async def __aenter__(self) -> Self:
        await self.wardens.listen("127.0.0.1")
        await self.wardens.bring(self.launcher, self.said.append, self.folder)
        return self

    async def __aexit__(self, *_) -> None:
        await self.wardens.close()
        await asyncio.to_thread(self.launcher.close)

    def start(self, name: str, code: str, *words: str, **more):
        return self.wardens.start(specification(name, code, *words, **more), self.folder / f"{name}.log")

    @property
    def warden_pid(self) -> int:
        return next(iter(self.wardens.nodes.values())).ready.pid


def test_exit_codes_signals_and_last_words(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path) as running:
            left = running.start("left", "import sys; print('its last line'); sys.exit(7)")
            assert await left.wait() == ProcessEnd(7, "its last line")
            code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); "
            polite = running.start("polite", f"{code} time.sleep(600)")
            await until(lambda: read(tmp_path / "polite.log") == "up\n", "it runs")
            polite.signal(signal.SIGTERM)
            assert (await polite.wait()).code == 75
            stubborn = running.start("stubborn", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                                     "print('up', flush=True); time.sleep(600)")  # fmt: skip
            await until(lambda: read(tmp_path / "stubborn.log") == "up\n", "it runs")
            assert (await stubborn.end(0.2)).code == -signal.SIGKILL
            missing = running.wardens.start(
                ProcessSpecification("missing", "test", ["/no/such/program"]), tmp_path / "missing.log"
            )
            end = await missing.wait()
            assert end.code == 127
            assert "cannot start /no/such/program" in end.last_words
        assert running.ends.keys() == {"left", "polite", "stubborn", "missing"}

    run(work())


def test_a_process_sees_its_environment_and_the_node_its_gpus(tmp_path: Path) -> None:
    from areal_core.interfaces.launcher import Needs

    async def work() -> None:
        async with Run(tmp_path) as running:
            code = "import os; print(os.environ['MINE'], os.environ['CUDA_VISIBLE_DEVICES'], "
            code += "os.environ['OMP_NUM_THREADS'], os.path.isdir(os.environ['AREAL_SCRATCH']))"
            shown = running.start("shown", code, environment={"MINE": "yes"}, needs=Needs(3, (1, 2)))
            assert (await shown.wait()).last_words == "yes 1,2 3 True"

    run(work())


@pytest.mark.parametrize("victim", ["process", "keeper", "warden", "warden asked", "supervisor"])
def test_nothing_is_left_whoever_is_killed(tmp_path: Path, tag: str, victim: str) -> None:
    """Orphans in sessions of their own end too."""

    async def work() -> None:
        async with Run(tmp_path) as running:
            process = running.start("parent", ORPHAN, tag)
            await until(lambda: len(tagged(tag)) == 3, "the process and its two children run")
            if victim == "process":
                parents = [pid for pid in tagged(tag) if b"subprocess" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                os.kill(parents[0], signal.SIGKILL)
                assert (await process.wait()).code == -signal.SIGKILL
            elif victim == "keeper":
                children = Path(f"/proc/{running.warden_pid}/task/{running.warden_pid}/children").read_text().split()
                os.kill(int(children[0]), signal.SIGKILL)
                assert (await process.wait()).last_words == "its keeper was killed"
            elif victim == "warden":
                os.kill(running.warden_pid, signal.SIGKILL)
                assert (await process.wait()).code == LOST
            elif victim == "warden asked":  # a scheduler gives notice: the supervisor decides, and here goes on
                os.kill(running.warden_pid, signal.SIGTERM)
                await until(lambda: running.notices == [signal.SIGTERM], "the notice has come")
                assert len(tagged(tag)) == 3
                await process.end()
            else:
                await running.wardens.close()  # as the kernel closes the sockets of a killed supervisor
            await until(lambda: not tagged(tag), "nothing is left")

    run(work())


def test_a_node_that_is_lost_does_not_leave_its_scratch(tmp_path: Path) -> None:
    """The next warden on the machine removes what one that was killed has left."""

    async def work() -> None:
        async with Run(tmp_path) as running:
            scratch = Path(next(iter(running.wardens.nodes.values())).ready.scratch)
            assert scratch.is_dir()
            os.kill(running.warden_pid, signal.SIGKILL)
            await until(lambda: not running.wardens.nodes, "the node is lost")
        assert scratch.is_dir()
        async with Run(tmp_path) as running:
            assert not scratch.exists()
            scratch = Path(next(iter(running.wardens.nodes.values())).ready.scratch)
        assert not scratch.exists()

    run(work())


def test_a_warden_that_cannot_be_brought_is_said_with_its_reason(tmp_path: Path) -> None:
    class Broken(LocalLauncher):
        def bring(self, command, environment):
            return super().bring([sys.executable, "-c", "raise SystemExit(3)"], environment)

    async def work() -> None:
        running = Run(tmp_path)
        running.launcher = Broken(LocalSettings())
        with pytest.raises(RunError, match="this machine: its warden ended with exit code 3"):
            await running.__aenter__()
        await running.__aexit__()

    run(work())


def test_who_shows_another_runs_token_brings_no_node(tmp_path: Path) -> None:
    async def work() -> None:
        async with Run(tmp_path) as running:
            command = [sys.executable, "-m", "areal_core.launchers.warden", running.wardens.address, "60"]
            other = Credentials.create(1).as_environment()
            stranger = subprocess.Popen(command, env={**os.environ, **other}, stderr=subprocess.DEVNULL)
            await asyncio.to_thread(stranger.wait)
            assert len(running.wardens.nodes) == 1

    run(work())


def test_keepers_without_a_run(tmp_path: Path, tag: str) -> None:
    """What a test or a script uses: its processes end with it."""

    async def work() -> None:
        keepers = Keepers(tmp_path)
        process = await keepers.start(specification("engine", ORPHAN, tag, end=EndMeans.REPLACED))
        await until(lambda: len(tagged(tag)) == 3, "the process and its two children run")
        assert (await process.end()).code == -signal.SIGKILL
        assert (await process.end()).code == -signal.SIGKILL
        assert not tagged(tag)
        await keepers.close()

    run(work())


def test_nothing_is_left_when_a_keeper_without_a_warden_is_killed(tmp_path: Path, tag: str) -> None:
    """A program that starts servers by hand."""
    code = f"""
import asyncio, pathlib, sys
from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.launchers.keepers import Keepers
async def work():
    keepers = Keepers(pathlib.Path(sys.argv[1]), adopts_orphans=True)
    command = [sys.executable, "-c", {ORPHAN!r}, sys.argv[2]]
    process = await keepers.start(ProcessSpecification("engine", "test", command))
    print(process.keeper_pid, flush=True)
    print(await process.wait(), flush=True)
asyncio.run(work())
"""
    program = subprocess.Popen([sys.executable, "-c", code, tmp_path, tag, ""], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    keeper = int(program.stdout.readline())
    run(until(lambda: len(tagged(tag)) == 3, "the process and its two children run"))
    os.kill(keeper, signal.SIGKILL)
    assert "its keeper was killed" in program.stdout.readline()
    assert not tagged(tag)
    assert program.wait() == 0


def test_a_log_is_bounded_and_its_end_is_kept(tmp_path: Path) -> None:
    log = keeper_module.BoundedLog(tmp_path / "logs" / "a.log", 1000)
    for number in range(200):
        log.write(f"line {number}\n".encode())
    assert (tmp_path / "logs" / "a.log").stat().st_size <= 1000
    assert (tmp_path / "logs" / "a.log.1").stat().st_size <= 1000
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "logs").iterdir()} == {0o600}
    assert log.last_words.splitlines()[-1] == "line 199"
    nowhere = keeper_module.BoundedLog(Path("/proc/no/such/a.log"), 1000)
    nowhere.write(b"still heard\n")
    assert nowhere.last_words == "still heard"


def test_a_log_that_cannot_be_begun_anew_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    """Its folder was removed, and is there again later."""
    path = tmp_path / "logs" / "a.log"
    log = keeper_module.BoundedLog(path, 100)
    log.write(b"first\n" * 15)
    path.unlink()
    path.parent.rmdir()
    for _ in range(3):
        log.write(b"lost\n" * 15)
    assert log.last_words.splitlines()[-1] == "lost"
    path.parent.mkdir()
    for _ in range(3):
        log.write(b"again\n" * 15)
    assert path.read_bytes() == b"again\n" * 15
    assert path.with_name("a.log.1").read_bytes() == b"again\n" * 15


def test_a_process_is_known_by_more_than_its_number() -> None:
    own = identify(os.getpid())
    assert has_ended(own) is False
    place, pid, start = own.rsplit(" ", 2)
    assert has_ended(f"{place} {pid} {int(start) + 1}") is True
    assert has_ended(f"elsewhere/pid:[1] {pid} {start}") is None
    done = subprocess.Popen(["true"])
    identity = identify(done.pid)
    done.wait()
    assert has_ended(identity) is True


def test_a_warden_needs_the_standard_library_alone() -> None:
    code = "import sys, areal_core.launchers.warden; print(sorted({m.split('.')[0] for m in sys.modules}))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    ).stdout
    foreign = {name for name in eval(shown) if name not in sys.stdlib_module_names}
    assert {name for name in foreign if not name.startswith(("_", "areal_core", "sitecustomize"))} == set()


def test_several_nodes_of_one_machine_each_with_processes_and_gpus_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    show = "import os; print(os.environ['AREAL_NODE'], os.environ['CUDA_VISIBLE_DEVICES'])"

    async def work() -> None:
        async with Run(tmp_path, nodes=2) as running:
            assert sorted(running.wardens.nodes) == ["node-0", "node-1"]
            shown = [running.start("first", show, needs=Needs(gpus=(1,))), running.start("last", show, node="node-1")]
            beside = running.start("beside", show, beside="last", needs=Needs(gpus=(2, 3)))
            ends = [await process.wait() for process in (*shown, beside)]
            assert [end.last_words for end in ends] == ["node-0 5", "node-1 6,7", "node-1 6,7"]
            found = await running.wardens.find_place((3,))
            assert found.node == "node-1"
            assert found.port
            with pytest.raises(RunError, match="there is no node for the process lost: the node node-7 is not there"):
                running.start("lost", show, node="node-7")

    run(work())


def test_a_node_that_fails_its_first_check_is_left_out_and_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shared_folder, "STALE_S", 1.0)  # here; the node itself waits for as long as it always does

    class Elsewhere(LocalLauncher):
        """Its last node sees another folder in the run's place."""

        def bring(self, command, environment):
            super().bring(command, environment)
            (tmp_path / "elsewhere").mkdir()
            program = f"""
import asyncio, pathlib, sys
from areal_core.launchers import shared_folder, warden
shared_folder.STALE_S, shared_folder.Path = 1, lambda _: pathlib.Path({str(tmp_path / "elsewhere")!r})
asyncio.run(warden.main(sys.argv[1], 60.0))
"""
            variables = {**os.environ, **environment, "AREAL_NODE": "astray"}
            words = [sys.executable, "-c", program, command[3]]
            self._wardens["astray"] = subprocess.Popen(words, env=variables, start_new_session=True)
            return 2

    async def work() -> None:
        running = Run(tmp_path)
        running.launcher = Elsewhere(LocalSettings())
        async with running:
            assert len(running.wardens.nodes) == 1
            assert "the node astray is left out: it does not see the run's folder" in running.said[0]
            assert (await running.start("still", "print('works')").wait()).last_words == "works"
            assert not list(tmp_path.glob(".nodes-*"))

    run(work())
