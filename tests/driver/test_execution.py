"""How a run begins: what is kept of it, and what is left where the disk refuses."""

from __future__ import annotations

import hashlib
import itertools
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core import waiting
from areal_core.checks import fingerprints
from areal_core.checks.fingerprints import check_unchanged, saved_records
from areal_core.disk import DiskError, replace_durably
from areal_core.driver import execution
from areal_core.errors import UsageError
from areal_core.files import KeptSources
from areal_core.plugins.provenance import Provenance
from areal_core.runtime import attempts
from areal_core.runtime.attempts import release
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.messages import RunStatus
from areal_core.runtime.rpc import Credentials
from areal_core.runtime.settings import LocalSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Killed(BaseException):
    """The program is killed here."""


def killed_at(number: int) -> Callable[[Path, bytes], None]:
    """`replace_durably`, killed at the file of this number, from 0."""
    numbers = itertools.count()

    def write(path: Path, data: bytes) -> None:
        if next(numbers) == number:
            raise Killed
        replace_durably(path, data)

    return write


def begin(
    run: RunFolder, files: Sequence[Path] = (), config: str = "steps: 1\n", records: Sequence[Provenance] = ()
) -> None:
    number = len(run.attempts()) + 1
    model = SimpleNamespace(path=None)
    resolved: Any = SimpleNamespace(to_yaml=lambda models: config, config=SimpleNamespace(model=model, roles={}))
    records = [*records_of(files), *records]
    credentials = Credentials.create(number)
    execution.claim_run(resolved, run, run.attempt(number), "tcp:127.0.0.1:9", credentials, records)


def records_of(files: Sequence[Path]) -> list[Provenance]:
    return [Provenance(str(path), "", "", str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


@pytest.mark.parametrize("source", ["# coding: latin-1\nNAME = 'é'\n".encode("latin-1"), b"A = 1\r\nB = 2\r\n"])
def test_sources_are_kept_byte_for_byte(
    tmp_path: Path, source: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "reward.py", RunFolder(tmp_path / "run")
    path.write_bytes(source)
    begin(run, [path])
    monkeypatch.setattr(KeptSources, "folder", run.sources)
    assert KeptSources.read(path) == source
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_new", [True, False], ids=["a new run", "a resume"])
def test_a_file_that_changes_behind_the_checks_is_refused(tmp_path: Path, is_new: bool) -> None:
    """What was tried is what trains, and what the records name."""
    path, run = tmp_path / "reward.py", RunFolder(tmp_path / "run")
    path.write_text("A = 1")
    if not is_new:
        begin(run, [path])
        release(run.attempt(1))
    checked = records_of([path])
    path.write_text("A = 2")
    with pytest.raises(UsageError, match=r"reward\.py was changed while it was checked"):
        begin(run, records=checked)
    if is_new:
        assert not run.path.exists()
    else:
        assert [*fingerprints.changed_copies(run, fingerprints.saved_records(run))] == []
        (copy,) = run.sources.glob("*.py")
        assert copy.read_text() == "A = 1"


def test_the_record_of_a_data_set_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its location is the text of the config; a file of that name in the current folder has nothing to do with it."""
    (tmp_path / "jsonl").write_text("mine")
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run")
    begin(run, records=[Provenance("dataset", "", "3 rows", "jsonl", "a hash of rows")])
    assert [*run.sources.iterdir()] == []


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_checked(
    tmp_path: Path, name: str, dry_run: bool
) -> None:
    (tmp_path / "file").touch()
    unread: Any = SimpleNamespace()
    with pytest.raises(UsageError, match=r"the run folder .* cannot be made: "):
        execution.execute(unread, run_dir=tmp_path / name, dry_run=dry_run)


def test_a_resume_with_fewer_steps_than_are_done_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    begin(run)
    release(run.attempt(1), "done 4")
    assert run.last_step is None
    for step in (0, 4):
        (run.attempt(1).checkpoints / f"step-{step:06}").mkdir(parents=True)
    asked: Any = SimpleNamespace(config=SimpleNamespace(steps=3))
    with pytest.raises(UsageError, match="the run has done 4 steps already, and steps is 3") as raised:
        execution.execute(asked, run_dir=None, resume=run.path, dry_run=True, allow_changes=False)
    assert raised.value.hints == (f"for more: areal run --resume {run.path} steps=8",)


def test_a_run_that_a_full_disk_did_not_let_begin_can_be_started_again(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    with pytest.raises(DiskError, match=r"the run folder cannot be written to .*: the disk is full") as raised:
        begin(run, config="a line\n" * 1_000_000)
    assert "run again" in str(raised.value)
    assert "--resume" not in str(raised.value)
    assert list(small_disk.iterdir()) == []
    begin(run)
    assert run.plugins.is_file()


def test_a_resume_that_a_full_disk_refuses_leaves_the_run_as_it_was(small_disk: Path) -> None:
    run = RunFolder(small_disk / "run")
    begin(run)
    release(run.attempt(1))
    with pytest.raises(DiskError, match="the run folder cannot be written") as raised:
        begin(run, config="a line\n" * 1_000_000)
    assert "--resume" in str(raised.value)
    assert run.config.read_text() == "steps: 1\n"
    begin(run)


@pytest.mark.parametrize("is_new", [True, False], ids=["a new run", "a resume"])
def test_a_kill_between_any_two_files_leaves_a_run_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """The resume changes the config and, with --allow-changes, a source."""
    reward, writes = tmp_path / "reward.py", 0
    for kill_at in itertools.count():
        run = RunFolder(tmp_path / f"run-{kill_at}")
        reward.write_text("former")
        if not is_new:
            begin(run, [reward])
            reward.write_text("latter")

        with monkeypatch.context() as dying:
            write = killed_at(kill_at)
            dying.setattr(execution, "replace_durably", write)
            dying.setattr(fingerprints, "replace_durably", write)
            try:
                begin(run, [reward], "steps: 2\n")
            except Killed:
                writes += 1
            else:
                break
        if run.config.is_file():
            check_unchanged(run, records_of([reward]), allowed=kill_at == 0)  # which has recorded nothing yet
        run.config.write_text("steps: 3\n")
        with pytest.raises(UsageError, match=r"config.yaml: was written by the run and has|was never started"):
            check_unchanged(run, records_of([reward]), allowed=False)
    assert writes == 4
    assert len(saved_records(run)) == 2, "nothing of before is left once all is written"


def resume(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, *, steps: int = 3, export: bool = True, dry_run: bool = False
) -> int:
    """What `execute` says of a resume, whose code is not to be imported."""
    launcher = SimpleNamespace(build=lambda: LocalLauncher(LocalSettings(fork_server=False)))
    config = SimpleNamespace(steps=steps, checkpoint=SimpleNamespace(export=export), launcher=launcher)
    resolved: Any = SimpleNamespace(config=config, provenance=list)
    monkeypatch.setattr(execution, "process_groups", lambda *_: (_ for _ in ()).throw(ImportError("imports")))
    return execution.execute(resolved, run_dir=None, resume=run.path, dry_run=dry_run, allow_changes=False)


def test_a_dry_run_waits_for_no_driver_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    begin(run)
    note = {"address": "tcp:127.0.0.1:9", "host": "far-away", "process": "elsewhere/pid:[1] 77 123"}
    run.attempt(1).driver.write_text(json.dumps(note))
    monkeypatch.setattr(waiting.time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(ImportError):  # it has come to the checks
        resume(run, monkeypatch, dry_run=True)


def test_a_run_that_is_done_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    begin(run)
    release(run.attempt(1), "done 3")
    assert resume(run, monkeypatch, export=False) == 0
    assert capsys.readouterr().out == (
        f"the run is done, with all its 3 steps; for more: areal run --resume {run.path} steps=6\n"
    )
    with pytest.raises(ImportError):
        resume(run, monkeypatch, steps=4, export=False)
    with pytest.raises(ImportError):
        resume(run, monkeypatch)
    run.model.mkdir()
    assert resume(run, monkeypatch) == 0


def test_a_run_in_progress_is_refused_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    begin(run)
    monkeypatch.setattr(attempts, "ask_driver", lambda *_: RunStatus("here", 7, 1, {}))
    with pytest.raises(UsageError, match=r"another process is running in .*: process 7 on here"):
        resume(run, monkeypatch)
