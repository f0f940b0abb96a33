"""`areal node`: what it refuses, and how long it waits for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from areal_core.errors import RunError, UsageError
from areal_core.runtime.attempts import claim, release
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.rpc import Credentials
from areal_nodes import joining
from areal_nodes import ranks as ranks_module
from areal_nodes.command import main
from areal_nodes.joining import join_run

if TYPE_CHECKING:
    from pathlib import Path

NOWHERE = "tcp:127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks_module._NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "POLL_S", 0.01)
    monkeypatch.setattr("areal_nodes.agent.CONNECT_TIMEOUT_S", 0.05)


def run_folder(path: Path, outcome: str | None = None) -> RunFolder:
    """A run with one attempt, whose driver is not there; it has ended in order if there is an outcome."""
    run = RunFolder(path)
    claim(run.attempt(1), NOWHERE, Credentials.create(1))
    if outcome is not None:
        release(run.attempt(1), outcome)
    return run


def test_a_folder_with_other_files_and_a_file_are_no_run_folders(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="is not a run folder: it contains other files"):
        main([str(tmp_path)])
    with pytest.raises(UsageError, match=r"thesis\.tex is a file, not a run folder"):
        main([str(tmp_path / "thesis.tex" / "run")])


def test_a_config_without_a_rank_is_an_error_that_shows_both_commands(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no scheduler has set a rank") as caught:
        main([str(tmp_path / "run"), "--config", "run.yaml"])
    assert "areal run ... launcher.type=external" in caught.value.hints[0]
    assert f"areal node {tmp_path}" in caught.value.hints[1]


def test_rank_0_must_know_the_number_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.raises(UsageError, match="how many nodes there are") as caught:
        main([str(tmp_path / "run"), "--config", "run.yaml"])
    assert caught.value.hints == ("add: launcher.nodes=N",)


def test_a_further_local_rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([str(tmp_path / "run"), "--config", "run.yaml"]) == 0
    assert "local rank 1 ends" in capsys.readouterr().out


def test_a_run_that_does_not_begin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot join the run in .*run: no driver answers within 0\.1 s") as caught:
        main([str(tmp_path / "run"), "--wait", "0.1"])
    assert "areal run ... launcher.type=external" in caught.value.hints[0]
    assert "contains no run" in caught.value.hints[1]


def test_a_driver_that_does_not_answer_is_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with pytest.raises(RunError, match=r"no driver answers within 0\.1 s") as caught:
        main([str(run.path), "--wait", "0.1"])
    assert f"areal run --resume {run.path}" in caught.value.hints[0]
    assert NOWHERE in caught.value.hints[1]


def test_a_run_that_is_done_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", "done 4")
    assert main([str(run.path)]) == 0
    assert f"the run in {run.path} has ended with exit code 0" in capsys.readouterr().out


@pytest.mark.parametrize("is_started", [False, True])
def test_a_run_that_has_failed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_started: bool) -> None:
    monkeypatch.setattr(joining, "PROGRESS_S", 0.02)
    run = run_folder(tmp_path / "run", "failed 4 1")
    lines: list[str] = []
    with pytest.raises(RunError, match=r"no driver answers within 0\.1 s"):
        join_run(run, wait_s=0.1, log=lines.append, is_started=is_started)
    assert f"it has stopped, resume it: areal run --resume {run.path}" in lines[-1]


def test_a_run_that_was_done_before_is_left_only_if_rank_0_does_not_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "run", "done 4")
    with pytest.raises(RunError, match=r"within 0\.1 s"):
        join_run(run, wait_s=0.1, log=print, is_started=True)
    monkeypatch.setattr(joining, "RESTART_TIMEOUT_S", 0.05)
    assert join_run(run, wait_s=60.0, log=print, is_started=True) == 0
