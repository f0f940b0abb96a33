"""A node that joins: how long it waits, and which exit code it ends with."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from areal_core.cli import main
from areal_core.errors import RunError
from areal_core.launchers import wardens as wardens_module
from areal_core.launchers.wardens import Wardens
from areal_core.messages import Credentials, connect
from areal_core.messages.processes import Beat, Leave, NodeReady, Owner
from areal_core.runs import joining as module
from areal_core.runs import ranks as ranks_module
from areal_core.runs.folder import RunFolder
from areal_core.runs.joining import Joining
from areal_core.runs.ownership import RECOVERING, claim, release
from areal_core.runs.watching import run_status, waits_for
from tests.runs.supervising import Supervising

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ranks_module._RANKS, "LOCAL_RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)


def test_requests_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["join", run, "--config", "run.yaml"]) == 2
    assert "no scheduler has said which rank this is" in capsys.readouterr().err
    assert main(["join", run, "--wait", "-1"]) == 2
    (tmp_path / "file").touch()
    for place, words in (
        ("file", "is a file"),
        ("file/run", "is a file"),
        ("", "is no run folder, and holds something"),
    ):
        capsys.readouterr()
        assert main(["join", str(tmp_path / place)]) == 2, "at once, and not when the wait is over"
        assert words in capsys.readouterr().err
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    assert main(["join", run, "--config", "run.yaml"]) == 2
    assert "add: launcher.nodes=N" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def joining(run: RunFolder, said: list[str], **more) -> Joining:
    return Joining(run, **{"has_warden": True, "patience_s": 60.0, "say": said.append, **more})


def test_a_run_between_two_epochs_is_recovering_as_long_as_its_owner_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    claim(run.epoch(1), "tcp:127.0.0.1:1", Credentials.create(1))
    release(run.epoch(1), f"{RECOVERING} 4 1")
    assert run_status(run)["state"] == "recovering"
    monkeypatch.setattr("areal_core.runs.watching.owner_has_ended", lambda _: True)
    assert run_status(run)["state"] == "lost"


def test_a_run_that_is_not_there_in_time_is_told_with_the_command_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", 0.1)
    said: list[str] = []
    with pytest.raises(RunError, match=r"no run to join within 1 s: no run is in .*launcher.type=joined"):
        joining(RunFolder(tmp_path / "run"), said, patience_s=1.0).serve()
    assert re.match("waiting since . s, of 1 s at most: no run is in ", said[0])


def test_a_run_that_is_done_ends_at_once_and_one_that_failed_before_is_waited_for(tmp_path: Path) -> None:
    run, said = RunFolder(tmp_path / "run"), list[str]()
    claim(run.epoch(1), "tcp:127.0.0.1:1", Credentials.create(1))
    release(run.epoch(1), "failed 4 1")
    with pytest.raises(RunError, match="areal run --resume") as found:
        joining(run, said, patience_s=0.5).serve()
    assert "launcher.host=ADDRESS" in str(found.value)
    release(run.epoch(1), "done 4")
    assert joining(run, said).serve() == 0


@pytest.mark.slow
def test_a_node_that_the_run_lets_go_stays_away(tmp_path: Path) -> None:
    """It was told to go, and came again as soon as the run had done without it."""
    run = RunFolder(tmp_path / "run")
    node = subprocess.Popen(
        [sys.executable, "-m", "areal_core", "join", str(run.path)], stdout=subprocess.PIPE, text=True
    )
    with Supervising(run, 1, lets_go=True) as supervising:
        deadline = time.monotonic() + 60
        while not supervising.nodes and time.monotonic() < deadline:
            time.sleep(0.02)
        node.terminate()
        node.send_signal(signal.SIGHUP)  # some give notice twice
        out, _ = node.communicate(timeout=60)
    assert node.returncode == 0
    assert "goes on without this node, which is to be taken away" in out


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_run_that_is_done_and_shall_go_on_is_waited_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 0.3 if is_settled else 60.0)
    run = RunFolder(tmp_path / "run")
    claim(run.epoch(1), "tcp:127.0.0.1:1", Credentials.create(1))
    release(run.epoch(1), "done 4")
    waits = joining(run, [], patience_s=1.0, is_started=True)
    if is_settled:
        assert waits.serve() == 0
    else:
        with pytest.raises(RunError, match="rank 0 is to start the run"):
            waits.serve()


@pytest.mark.slow
@pytest.mark.parametrize("has_warden", [True, False])
def test_a_node_goes_from_epoch_to_epoch_and_ends_with_the_runs_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_warden: bool
) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.1)
    run, said = RunFolder(tmp_path / "run"), list[str]()
    words = ["-m", "areal_core", "join", str(run.path)]
    node = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    ends: list[int] = []
    waits = threading.Thread(target=lambda: ends.append(joining(run, said, has_warden=False).serve()))
    if not has_warden:
        waits.start()
    for number, outcome in ((1, f"{RECOVERING} 4 1"), (2, "interrupted 4 143")):
        with Supervising(run, number) as supervising:
            deadline = time.monotonic() + 60
            while not (supervising.nodes and (has_warden or len(said) == number)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(supervising.nodes) == 1
        assert node.poll() is None, "it comes again"
        release(supervising.epoch, outcome)
    out, _ = node.communicate(timeout=60)
    assert node.returncode == 143
    assert [line.rpartition(", ")[2] for line in out.splitlines()[:2]] == ["epoch 1", "epoch 2"]
    if not has_warden:
        waits.join(60)
        assert ends == [143]
        assert said[:2] == [f"joined the run in {run.path}, epoch {number}" for number in (1, 2)]


@pytest.mark.long
@pytest.mark.slow
def test_an_owner_that_is_gone_without_a_word_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GONE_S", 1.0)
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.1)
    run, said = RunFolder(tmp_path / "run"), list[str]()
    node = joining(run, said, has_warden=False)
    failed: list[RunError] = []

    def serve() -> None:
        try:
            node.serve()
        except RunError as error:
            failed.append(error)

    waits = threading.Thread(target=serve)
    first = subprocess.Popen([sys.executable, "-m", "areal_core", "join", str(run.path)])
    with Supervising(run) as supervising:
        waits.start()
        deadline = time.monotonic() + 60
        while not (said and supervising.nodes) and time.monotonic() < deadline:
            time.sleep(0.02)
        first.kill()
        first.wait()
    waits.join(60)
    assert "is gone, and no other has come within 1 s" in str(failed[0])
    assert f"areal run --resume {run.path}" in str(failed[0])


def test_a_run_that_lets_go_of_a_node_again_and_again_does_not_want_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    claim(run.epoch(1), "tcp:127.0.0.1:1", Credentials.create(1))
    monkeypatch.setattr(Joining, "_owner", lambda *_: Owner("here", 1, 1, {}, {}, {}))
    monkeypatch.setattr(Joining, "_run_warden", lambda *_: None)
    with pytest.raises(RunError, match="has let go of this node 3 times: it does not take it"):
        joining(run, []).serve()


JOIN_AND_TELL = """
import sys
from areal_core.cli import main
from areal_core.runs import joining
joining.PROGRESS_S = joining.ASK_EVERY_S = 0.2
sys.exit(main(["join", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_warden", [True, False])
def test_while_the_run_ends_and_waits_for_a_silent_node_the_others_are_told(tmp_path: Path, has_warden: bool) -> None:
    """They were told to resume, or came again and were left in silence, where the run had gone back in place."""
    run, told = RunFolder(tmp_path / "run"), list[str]()
    second = {} if has_warden else {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    mute = subprocess.Popen([sys.executable, "-m", "areal_core", "join", str(run.path)])
    node = subprocess.Popen(
        [sys.executable, "-u", "-c", JOIN_AND_TELL, str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **second, "AREAL_NODE": "well"},
    )
    assert node.stdout is not None
    with Supervising(run, goes_back=True) as supervising:
        while "joined the run" not in (line := node.stdout.readline()):
            assert line, "it has ended"
        deadline = time.monotonic() + 60
        while not (supervising.nodes and len(supervising.wardens.nodes) > has_warden) and time.monotonic() < deadline:
            time.sleep(0.02)
        mute.send_signal(signal.SIGSTOP)
        supervising._is_over.set()
        while "ends within" not in (told[-1:] or [""])[0]:
            told.append(node.stdout.readline())
            assert told[-1], told
        status = run_status(run)
        assert status["is_ending"]
        assert "no word from " in waits_for(status)
        mute.send_signal(signal.SIGCONT)
    release(supervising.epoch, "interrupted 4 143")
    told.append(node.communicate(timeout=60)[0])
    assert (node.returncode, mute.wait(60)) == (143, 143)
    words = "".join(told)
    assert re.search(r"waiting since .* is ending: no word from .*: what runs there ends within \d+ s", words)
    assert [wrong for wrong in ("has said nothing", "areal run --resume", "no owner") if wrong in words] == []
    assert words.count("joined the run") == 0


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_node_that_has_joined_and_says_nothing_is_waited_for_until_its_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Nobody here can end it: the run's end is confirmed only then; a connection that has ended confirms nothing."""
    monkeypatch.setattr(wardens_module, "PROGRESS_S", 0.2)
    credentials, said, heard, may_end = Credentials.create(1), list[str](), list[object](), threading.Event()

    async def serve_one(address: str, is_there: asyncio.Event) -> None:
        channel = await connect(address, 10, "warden", credentials)
        channel.post(NodeReady("mute", "mute", "127.0.0.1", "lo", 1, 1, 0, str(tmp_path), 1, "python", True))
        is_there.set()
        while not may_end.is_set():
            heard.append(await channel.receive())
        await channel.close()

    async def work() -> float:
        nothing = dict.fromkeys(("on_message", "on_end", "on_notice", "on_visitor"), lambda *_: None)
        wardens, is_there = Wardens(credentials, **nothing), asyncio.Event()
        wardens._say = said.append
        await wardens.listen("127.0.0.1")
        node = asyncio.ensure_future(serve_one(wardens.address, is_there))
        await is_there.wait()
        while not wardens.nodes:
            await asyncio.sleep(0.01)
        if is_lost:
            may_end.set()
            while wardens.nodes:
                await asyncio.sleep(0.01)
        began = time.monotonic()
        monkeypatch.setattr(wardens_module, "LEASE_S", 30.0 if is_lost else 0.5)
        monkeypatch.setattr(wardens_module, "MARGIN_S", 0.5)
        closing = asyncio.ensure_future(wardens.close())
        if is_lost:
            await asyncio.sleep(1.0)
            assert not closing.done()
            for lost in wardens._unconfirmed.values():
                lost.heard -= 30.0
        await closing
        took = time.monotonic() - began
        await asyncio.wait({node}, timeout=10)
        return took

    assert asyncio.run(work()) >= 1.0
    assert f"no word from mute{' (lost)' * is_lost}: what runs there ends within" in said[-1]
    if not is_lost:
        assert isinstance(next(message for message in heard if not isinstance(message, Beat)), Leave)
