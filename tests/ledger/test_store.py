"""The ledger when things go wrong: a full disk, and segments that are no longer needed."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.ledger.audit import audit_folder
from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.segments import read_record
from areal_core.ledger.store import DATABASE, Ledger

if TYPE_CHECKING:
    from pathlib import Path


def open_ledger(run_dir: Path, epoch: int = 1) -> Ledger:
    """The ledger of an epoch of a run."""
    return Ledger(run_dir / "attempts" / f"{epoch}" / "ledger", run_dir)


def flush(ledger: Ledger, groups: list[PromptGroup]) -> list[PromptGroup]:
    """Finish some groups and make them durable."""
    for group in groups:
        ledger.ended(group)
    return ledger.flush()


def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path, written: Any) -> None:
    ledger = open_ledger(small_disk)
    ledger.dispatched(0, 0, 0)
    flush(ledger, written(ledger.folder, [0]))
    for number in (1, 2):
        ledger.dispatched(number, number, 0)
    groups = written(ledger.folder, [1, 2])
    taken = small_disk / "taken"
    usage = os.statvfs(small_disk)
    taken.write_bytes(bytes(usage.f_bavail * usage.f_frsize))
    ledger.failed(1, 0, 0, "a traceback" * 10_000)
    with pytest.raises(RunError, match="disk is full") as raised:
        flush(ledger, groups)
    assert "iB are free on the disk of" in str(raised.value)
    assert [group.number for group in ledger.finished()] == [0]
    ledger.dispatched(3, 3, 0)
    ledger.failed(3, 0, 0, "a text that no disk takes: \ud800")
    taken.unlink()
    flushed = flush(ledger, written(ledger.folder, [3]))
    assert [group.number for group in flushed] == [1, 2, 3], "what the disk refused stayed to be written"
    assert ledger.flush() == []
    ledger.close()
    again = open_ledger(small_disk)
    assert [group.number for group in again.finished()] == [0, 1, 2, 3]


def test_a_commit_that_a_full_disk_refuses_can_be_done_again(small_disk: Path) -> None:
    """Its transaction is through, and the disk has no room left to bring it from the write-ahead log into its file."""
    ledger = open_ledger(small_disk)
    for number in range(3000):
        ledger.dispatched(number, number, 0)
    ledger.flush()
    usage = os.statvfs(small_disk)
    taken = small_disk / "taken"
    taken.write_bytes(bytes(usage.f_bavail * usage.f_frsize - 3 * 4096))
    checkpoint = small_disk / "attempts/1/checkpoints/step-000001"
    for _ in range(3):
        with pytest.raises(DiskError, match=r"the ledger cannot be written to .*: database or disk is full"):
            ledger.commit(1, checkpoint, 10)
    taken.unlink()
    ledger.commit(1, checkpoint, 10)
    assert ledger.committed_step == 1
    assert (ledger.folder / f"{DATABASE}-wal").stat().st_size == 0, "it stands in the file itself"
    ledger.close()


@pytest.mark.parametrize("what", ["checkpoint_digest", "_attempt"])
def test_a_commit_that_cannot_read_the_run_folder_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A network file system that has lost a file's handle; the ledger takes everything else before and after."""

    def stale(*_: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    ledger = open_ledger(tmp_path)
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    with monkeypatch.context() as broken:
        broken.setattr(f"areal_core.ledger.store.{what}", stale)
        with pytest.raises(DiskError, match=r"the ledger cannot be written to .*: Stale file handle"):
            ledger.commit(1, checkpoint, 10)
    ledger.dispatched(0, 0, 0)
    assert [group.number for group in flush(ledger, [PromptGroup(0, (0, 0))])] == [0]
    assert ledger.committed_step == 0
    ledger.commit(1, checkpoint, 10)
    assert ledger.committed_step == 1
    ledger.close()


def test_whatever_ends_a_transaction_rolls_it_back(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    with suppress(KeyboardInterrupt), ledger._transaction() as database:
        database.execute("INSERT INTO facts VALUES ('half', '1')")
        raise KeyboardInterrupt
    ledger.dispatched(0, 0, 0)
    ledger.flush()
    assert ledger.facts() == {}
    assert ledger.unfinished() == [0]
    ledger.close()


def test_threads_that_flush_write_every_group_once_and_in_order(tmp_path: Path) -> None:
    ledger, durable, is_over = open_ledger(tmp_path), deque[int](), threading.Event()

    def write() -> None:
        while not is_over.is_set():
            durable.extend(group.number for group in ledger.flush())

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write) for _ in range(3)]
        for number in range(500):
            ledger.dispatched(number, number, 0)
            ledger.ended(PromptGroup(number, (number, 0)))
        is_over.set()
    for writer in writers:
        writer.result()
    durable.extend(group.number for group in ledger.flush())
    assert sorted(durable) == list(range(500))
    assert [group.number for group in ledger.finished()] == list(range(500)), "none is running again"
    ledger.close()


def test_a_segment_stays_until_it_is_named(tmp_path: Path, written: Any) -> None:
    """However often the database refuses to name it, and whatever is committed meanwhile."""
    ledger = open_ledger(tmp_path)
    ledger.dispatched(0, 0, 0)
    ledger.flush()
    (pages,) = ledger.database.execute("PRAGMA page_count").fetchone()
    ledger.database.execute(f"PRAGMA max_page_count = {pages}")
    ledger.failed(0, 0, 0, "more than fits" * 10_000)
    groups = written(ledger.folder, [0])
    with pytest.raises(DiskError, match="database or disk is full"):
        flush(ledger, groups)
    for _ in range(3):
        with pytest.raises(DiskError, match="database or disk is full"):
            ledger.flush()
    ledger.commit(0, tmp_path / "attempts/1/checkpoints/step-000000", 1)
    ledger.database.execute(f"PRAGMA max_page_count = {10 * pages}")
    assert [group.number for group in ledger.flush()] == [0]
    (group,) = ledger.finished()
    assert read_record(tmp_path, group.record) == b"group 0"
    ledger.close()


def test_what_is_damaged_or_missing_is_generated_anew(tmp_path: Path, written: Any) -> None:
    ledger, told = open_ledger(tmp_path), []
    for number in range(4):
        ledger.dispatched(number, number, 0)
    flush(ledger, written(ledger.folder, [0, 1]))
    flush(ledger, written(ledger.folder, [2]))
    flush(ledger, [PromptGroup(3, (3, 0))])
    first, second = sorted(tmp_path.glob("attempts/1/segments/*"))
    first.write_bytes(first.read_bytes().replace(b"group 1", b"group 7"))
    second.unlink()
    assert [group.number for group in ledger.finished(told.append)] == [0, 3]
    assert ledger.unfinished() == [1, 2]
    assert [words.rpartition(": ")[2] for words in told] == [f"generating group {n} again" for n in (1, 2)]
    assert "are damaged, from byte 7 on" in told[0]
    assert "cannot be read" in told[1]


def test_a_ledger_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "attempts/1/ledger" / DATABASE).mkdir(parents=True)
    with pytest.raises(DiskError, match="unable to open database file"):
        open_ledger(tmp_path)


def test_segments_go_when_their_groups_are_committed(tmp_path: Path, written: Any) -> None:
    ledger = open_ledger(tmp_path)
    for number in range(4):
        ledger.dispatched(number, number, 0)
    flush(ledger, written(ledger.folder, [0, 1]))
    flush(ledger, written(ledger.folder, [2, 3]))
    ledger.consumed([0, 1], step=0)
    ledger.commit(1, tmp_path / "step-1", 4)
    assert len(list(tmp_path.glob("attempts/1/segments/*"))) == 1
    ledger.consumed([2], step=1)
    ledger.commit(1, tmp_path / "step-1", 4)
    groups = ledger.finished()
    assert [g.number for g in groups] == [3]
    ledger.rollback(discard=False)
    groups = ledger.finished()
    assert [g.number for g in groups] == [2, 3], "what a discarded step consumed comes first"
    assert read_record(tmp_path, groups[0].record) == b"group 2"


def test_a_checkpoint_that_is_put_aside_leaves_the_one_before_it(tmp_path: Path, written: Any) -> None:
    ledger = open_ledger(tmp_path)
    checkpoints = [tmp_path / f"attempts/1/checkpoints/step-00000{step}" for step in range(4)]
    for number in range(6):
        ledger.dispatched(number, number, 0)
    for step, folder in enumerate(checkpoints[1:], 1):
        flush(ledger, written(ledger.folder, [step - 1]))
        ledger.consumed([step - 1], step=step - 1)
        folder.mkdir(parents=True)
        ledger.commit(step, folder, step + 2)
    flush(ledger, written(ledger.folder, [3]))
    checkpoints[1].rmdir()  # as `checkpoint.keep` has it
    ledger.close()
    checkpoints[3].rename(tmp_path / "damaged-step-000003")
    (tmp_path / "attempts/1/checkpoints/step-000009").mkdir()  # that nobody has committed
    again = Ledger.take_over(tmp_path / "attempts/2/ledger", [ledger.folder], tmp_path)
    again.rollback(discard=False)
    assert (again.committed_step, again.checkpoint) == (2, checkpoints[2])
    assert again.facts()["committed_position"] == "4"
    assert again.unfinished() == [2, 4, 5], "what the step after it had consumed is generated again"
    assert [group.number for group in again.finished()] == [3]
    flush(again, written(again.folder, [2]))
    again.consumed([2], step=2)
    again.close()
    checkpoints[2].rename(tmp_path / "damaged-step-000002")
    last = Ledger.take_over(tmp_path / "attempts/3/ledger", [again.folder], tmp_path)
    assert last.checkpoint == checkpoints[2], "there is none that it could go back to: whoever loads it is told"
    last.close()


def test_a_segment_that_no_row_names_stays_for_its_attempt(tmp_path: Path, written: Any) -> None:
    """Its worker may be about to tell of it, or was killed before."""
    first = open_ledger(tmp_path)
    (orphan,) = written(first.folder, [0])
    first.commit(1, tmp_path / "attempts/1/checkpoints/step-000001", 1)
    assert (tmp_path / orphan.record.segment).is_file()
    first.close()
    second = Ledger.take_over(tmp_path / "attempts/2/ledger", [first.folder], tmp_path)
    second.commit(2, tmp_path / "attempts/2/checkpoints/step-000002", 1)
    assert not (tmp_path / orphan.record.segment).exists()
    second.close()


def test_a_second_reader_is_refused_and_never_told_that_there_is_nothing(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path)
    ledger.dispatched(0, 0, 0)
    ledger.flush()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        sqlite3.connect(ledger.folder / DATABASE, timeout=0.1).execute("SELECT * FROM groups")
    ledger.close()


def test_a_new_epoch_takes_over_a_copy_and_touches_nothing_before_it_commits(tmp_path: Path, written: Any) -> None:
    """Also of an owner that was killed: what it had committed stands in its write-ahead log."""
    first = open_ledger(tmp_path)
    for number in range(3):
        first.dispatched(number, number, 0)
    flush(first, written(first.folder, [0, 1]))
    first.consumed([0], step=0)
    first.commit(1, tmp_path / "attempts/1/checkpoints/step-000001", 3)
    first.consumed([1], step=1)  # and then it is killed: nothing is closed
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    second = Ledger.take_over(tmp_path / "attempts/2/ledger", [first.folder], tmp_path)
    second.rollback(discard=False)
    assert second.committed_step == 1
    assert second.checkpoint == tmp_path / "attempts/1/checkpoints/step-000001"
    assert [group.number for group in second.finished()] == [1]
    assert second.unfinished() == [2]
    flush(second, written(second.folder, [2]))
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before
    second.consumed([1, 2], step=1)
    second.commit(2, tmp_path / "attempts/2/checkpoints/step-000002", 3)
    left = [*first.folder.iterdir(), *tmp_path.glob("attempts/1/segments/*")]
    assert left == [], "after its own commit nothing of the former epoch is needed"
    first.database.close()
    second.close()


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_ledger_that_is_lost_does_not_begin_the_run_anew_beside_its_checkpoints(tmp_path: Path, how: str) -> None:
    first = open_ledger(tmp_path)
    first.dispatched(0, 0, 0)
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    first.commit(1, checkpoint, 1)
    first.close()
    for path in first.folder.iterdir():
        path.unlink()
    if how == "empty":
        (first.folder / DATABASE).touch()
    with pytest.raises(RunError, match=f"has checkpoints, but its ledger .*attempts/1/ledger/{DATABASE} is {how}"):
        Ledger.take_over(tmp_path / "attempts/2/ledger", [first.folder], tmp_path)
    checkpoint.rmdir()
    Ledger.take_over(tmp_path / "attempts/3/ledger", [first.folder], tmp_path).close()


def test_an_epoch_that_died_before_it_had_a_ledger_is_passed_over(tmp_path: Path) -> None:
    first = open_ledger(tmp_path)
    first.dispatched(0, 0, 0)
    first.close()
    folders = [first.folder, tmp_path / "attempts/2/ledger"]
    third = Ledger.take_over(tmp_path / "attempts/3/ledger", folders, tmp_path)
    assert third.unfinished() == [0]
    third.close()


def test_a_former_owner_commits_nothing_and_deletes_nothing_of_its_successor(tmp_path: Path, written: Any) -> None:
    """One that was stopped, and goes on after somebody else has taken the run over."""
    first = open_ledger(tmp_path)
    first.dispatched(0, 0, 0)
    flush(first, written(first.folder, [0]))
    first.consumed([0], step=0)
    second = Ledger.take_over(tmp_path / "attempts/2/ledger", [first.folder], tmp_path)
    second.dispatched(1, 1, 0)
    flush(second, written(second.folder, [1]))
    before = {path: path.read_bytes() for path in second.folder.iterdir()}
    with pytest.raises(RunError, match="another process has taken over the run"):
        first.commit(1, tmp_path / "attempts/1/checkpoints/step-000001", 1)
    assert first.committed_step == 0
    assert {path: path.read_bytes() for path in second.folder.iterdir()} == before
    first.close()
    second.close()


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "attempts/1/ledger"
    folder.mkdir(parents=True)
    (folder / DATABASE).write_bytes(b"no database" * 400)
    with pytest.raises(RunError, match="is damaged"):
        open_ledger(tmp_path)
    with pytest.raises(RunError, match="is damaged"):
        audit_folder(folder, tmp_path)


def test_tracebacks_of_old_failures_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In however large bites they come; that an episode failed stays."""
    monkeypatch.setattr("areal_core.ledger.store.KEPT_TRACEBACKS", 10)
    ledger = open_ledger(tmp_path)
    for count in (3, 12, 1, 40, 2):
        for _ in range(count):
            ledger.failed(0, 0, 0, "a traceback")
        ledger.flush()
    errors = [error for (error,) in ledger.database.execute("SELECT error FROM failures ORDER BY rowid")]
    assert errors == [""] * 48 + ["a traceback"] * 10
    ledger.close()


@pytest.mark.parametrize(
    ("oldest", "trained", "staleness"),
    [(2, 5, 0), (2, 7, 2), (2, 4, 0), (-1, 7, 0)],
    ids=["current weights", "two batches behind", "weights from a later batch", "no sampled token"],
)
def test_staleness_counts_the_batches_trained_since_the_weights_were_synced(oldest, trained, staleness):
    assert PromptGroup(0, (0, 0), oldest=oldest).staleness({2: 5}, trained) == staleness
