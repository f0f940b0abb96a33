"""The ledger: what became of every prompt group, so that none is lost and none is trained on twice.

SQLite in the run folder holds the state of each group; the trajectories of finished groups lie beside it in
safetensors segments. Writes are collected and made durable together, `flush` by `flush`: first the segment, then one
transaction that names it. A process that is killed in between loses at most groups that are then issued again.

A step is provisional until its checkpoint commits. `committed_step` in the ledger is the commit point, not the
folder: `rollback` returns what later steps consumed to `finished`, in the order in which they were consumed.
"""

from __future__ import annotations

import errno
import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_core.data.batch import PackedBatch
from areal_core.data.digest import group_digests
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,      -- the group's place in the data, and its group_id
    data_row INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'consumed', 'dropped')),
    reason TEXT,                     -- why it was dropped
    segment TEXT,                    -- the file that holds its trajectories
    digest TEXT,                     -- of its token ids, as the controller saw them
    step INTEGER,                    -- the step that consumed or dropped it
    place INTEGER                    -- its place among those that the step consumed
);
CREATE TABLE IF NOT EXISTS publications (version INTEGER PRIMARY KEY, trained INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS failures (number INTEGER, sample INTEGER, attempt INTEGER, error TEXT);
"""


@dataclass(slots=True)
class FinishedGroup:
    """A group whose trajectories are in a segment and in memory.

    Attributes:
        number: of the group.
        batch: the segment's sequences, shared by the groups of one flush; None until it is read after a resume.
        rows: which sequences of `batch` are this group's; none for a group that failed and is not replaced.
    """

    number: int
    batch: PackedBatch | None
    rows: range


@dataclass(slots=True)
class _Pending:
    """What the next flush writes."""

    groups: list[tuple[object, ...]] = field(default_factory=list)
    dropped: list[tuple[object, ...]] = field(default_factory=list)
    failures: list[tuple[object, ...]] = field(default_factory=list)


class Ledger:
    """State of every prompt group of a run, in `run_dir/ledger`. One process writes it.

    Raises:
        RunError: the disk is full or the folder cannot be written; nothing that was committed is affected.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "ledger"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(self.folder / "ledger.sqlite", isolation_level=None)
        # Write-ahead logging keeps what a killed process had committed; only a power failure can take the last
        # transactions, and checkpoints are synced for that.
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(SCHEMA)
        self._pending = _Pending()
        # A segment's number is never used again, also not after a resume.
        self._segment_number = 1 + max((int(p.stem) for p in self.folder.glob("*.safetensors")), default=-1)

    # What happens to groups. Kept in memory until the next flush.

    def issued(self, number: int, row: int, epoch: int) -> None:
        """A group was handed to its episodes."""
        self._pending.groups.append((number, row, epoch))

    def dropped(self, number: int, reason: str, step: int) -> None:
        """A group will not be trained on, for this reason."""
        self._pending.dropped.append((reason, step, number))

    def failed(self, number: int, sample: int, attempt: int, error: str) -> None:
        """An episode failed; `error` is its traceback."""
        self._pending.failures.append((number, sample, attempt, error))

    def flush(self, finished: Sequence[tuple[int, range]] = (), batch: PackedBatch | None = None) -> None:
        """Make everything so far durable, together with the trajectories of finished groups.

        Args:
            finished: number of each group and its sequences in `batch`; an empty range is a group without data.
            batch: the trajectories of all of them.
        """
        pending, self._pending = self._pending, _Pending()
        if not (pending.groups or pending.dropped or pending.failures or finished):
            return
        segment = self._write_segment(batch) if batch is not None else None
        digests = group_digests(batch, finished) if batch is not None else {}
        with self._transaction() as database:
            database.executemany(
                "INSERT OR REPLACE INTO groups (number, data_row, epoch, state) VALUES (?, ?, ?, 'running')",
                pending.groups,
            )
            database.executemany(
                "UPDATE groups SET state = 'dropped', reason = ?, step = ?, segment = NULL WHERE number = ?",
                pending.dropped,
            )
            database.executemany(
                "UPDATE groups SET state = 'finished', segment = ?, digest = ? WHERE number = ?",
                [(segment if rows else None, digests.get(number), number) for number, rows in finished],
            )
            database.executemany("INSERT INTO failures VALUES (?, ?, ?, ?)", pending.failures)

    def consumed(self, numbers: Iterable[int], step: int) -> None:
        """These groups, in this order, went into the batch of `step` (0 is the first). Durable at once."""
        with self._transaction() as database:
            database.executemany(
                "UPDATE groups SET state = 'consumed', step = ?, place = ? WHERE number = ?",
                [(step, place, number) for place, number in enumerate(numbers)],
            )

    def published(self, version: int, trained: int) -> None:
        """Weights of this version, from so many trained batches, are about to generate. Durable at once."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO publications VALUES (?, ?)", (version, trained))

    # Commit and resume.

    def commit(self, step: int, checkpoint: str, position: int) -> None:
        """`step` steps are in the named checkpoint, and the next group to issue is `position`: the commit point."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with self._transaction() as database:
            facts = {"committed_step": step, "checkpoint": checkpoint, "committed_position": position}
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(k, str(v)) for k, v in facts.items()])
            used = database.execute(
                "SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL "
                "AND (state = 'finished' OR (state = 'consumed' AND step >= ?))",
                (step,),
            ).fetchall()
        keep = {name for (name,) in used}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in keep:
                path.unlink()

    @property
    def committed_step(self) -> int:
        """Steps in the last committed checkpoint; 0 before the first."""
        return int(self.fact("committed_step") or 0)

    @property
    def committed_position(self) -> int:
        """The next group to issue as of the last commit."""
        return int(self.fact("committed_position") or 0)

    def fact(self, name: str) -> str | None:
        """A fact about the run, as last committed or noted."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def note(self, name: str, value: str) -> None:
        """Record a fact about the run. Durable at once."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def rollback(self, *, discard: bool) -> None:
        """Undo what steps after the committed one did to groups; call once at the start of a resumed run.

        Args:
            discard: forget every group issued since the commit, so that it is generated anew (deterministic mode);
                otherwise finished work stays, and only what was running is issued again.
        """
        step = self.committed_step
        with self._transaction() as database:
            database.execute("UPDATE groups SET state = 'finished' WHERE state = 'consumed' AND step >= ?", (step,))
            if discard:
                database.execute("DELETE FROM groups WHERE number >= ?", (self.committed_position,))

    def unfinished(self) -> list[int]:
        """Groups that were issued and whose fate was not recorded, in order."""
        rows = self._database.execute("SELECT number FROM groups WHERE state = 'running' ORDER BY number")
        return [number for (number,) in rows]

    def finished(self) -> list[FinishedGroup]:
        """Finished groups with their trajectories, first those that a rolled-back step had consumed, in its order."""
        rows = self._database.execute(
            "SELECT number, segment FROM groups WHERE state = 'finished' ORDER BY step IS NULL, step, place, number"
        ).fetchall()
        batches = {name: self._read_segment(name) for name in {segment for _, segment in rows if segment}}
        groups = []
        for number, segment in rows:
            if segment is None:
                groups.append(FinishedGroup(number, None, range(0)))
                continue
            members = (batches[segment]["group_id"] == number).nonzero().flatten().tolist()
            groups.append(FinishedGroup(number, batches[segment], range(members[0], members[-1] + 1)))
        return groups

    def position(self) -> int:
        """One more than the last group ever issued."""
        return int(self._database.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()[0])

    def publications(self) -> dict[int, int]:
        """For each weight version the batches trained when it was published."""
        return dict(self._database.execute("SELECT version, trained FROM publications").fetchall())

    def counts(self) -> dict[str, int]:
        """Groups in each state, dropped ones as `dropped: REASON`."""
        rows = self._database.execute("SELECT state, COALESCE(reason, ''), COUNT(*) FROM groups GROUP BY 1, 2")
        return {f"{state}: {reason}" if state == "dropped" else state: count for state, reason, count in rows}

    def close(self) -> None:
        """Write what is pending and close; safe to call twice."""
        self.flush()
        self._database.close()

    def _write_segment(self, batch: PackedBatch) -> str:
        name = f"{self._segment_number:09d}.safetensors"
        self._segment_number += 1
        with _disk_errors(self.folder):
            (self.folder / name).write_bytes(batch.to_bytes())
        return name

    def _read_segment(self, name: str) -> PackedBatch:
        return PackedBatch.from_bytes((self.folder / name).read_bytes())

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """`BEGIN IMMEDIATE` to `COMMIT`, with the disk's errors in our words."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise _ledger_error(self.folder, str(error)) from error


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full or unwritable disk into a RunError."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
        raise _ledger_error(folder, reason) from error


def _ledger_error(folder: Path, reason: str) -> RunError:
    return RunError(
        f"the ledger in {folder} cannot be written: {reason}",
        hints=[f"nothing committed is lost; make room, then continue with: areal run --resume {folder.parent}"],
    )
