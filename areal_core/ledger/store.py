"""The ledger: what became of every prompt group, so that none is lost and none is trained on twice.

SQLite in the folder of the run's attempt holds the state of each group, and where its trajectories lie: in segments,
which rollout workers write and sync before they say so. The rollout controller alone opens the ledger. Writes are
collected and made durable together, `flush` by `flush`. A process that is killed in between loses at most groups that
are then dispatched again. What a full disk refused stays to be written.

The disk may be slow, so the controller has threads write: its event loop only adds to what the next flush writes.

A power cut may take the latest transactions, never a part of one. `commit` alone waits for the disk, before anything
that the former commit rests on is removed.

A step is provisional until its checkpoint commits. `committed_step` in the ledger is the commit point, not the
folder: `rollback` returns what later steps consumed to `finished`, in the order in which they were consumed.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from areal_core.disk import file_digest, refused, replacing_folder, sync_names, writing
from areal_core.errors import RunError, writable
from areal_core.interfaces.record import Record
from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.segments import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

DATABASE = "ledger.sqlite"
_DISK_REFUSES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,      -- the group's place in the data, and its group_id
    data_row INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'consumed', 'dropped')),
    reason TEXT,                     -- why it was dropped
    segment TEXT,                    -- the file that holds its trajectories, relative to the run folder, until it goes
    position INTEGER,                -- of their first byte in it
    size INTEGER,                    -- in bytes
    digest TEXT,                     -- of these bytes
    oldest INTEGER,                  -- weight version that sampled a token of them; -1 where none was sampled
    step INTEGER,                    -- the step that consumed or dropped it
    place INTEGER                    -- its place among those that the step consumed
);
CREATE TABLE IF NOT EXISTS weight_syncs (version INTEGER PRIMARY KEY, trained INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS failures (number INTEGER, sample INTEGER, attempt INTEGER, error TEXT);
"""
KEPT = "kept "
"""Begins the name of a fact, before the step of a checkpoint that was committed; position, place and digest are its
value."""
KEPT_TRACEBACKS = 10_000
"""Of the latest failures; of older ones only that they were is kept, or a run of months would be made of them."""


class _Kept(NamedTuple):
    """A checkpoint that was committed."""

    step: int
    position: int
    name: str
    digest: str = ""


class _Write(NamedTuple):
    """A statement that the next flush executes; `finished` is the group that it makes durable."""

    statement: str
    values: tuple[object, ...]
    finished: PromptGroup | None = None


_DISPATCH = "INSERT OR REPLACE INTO groups (number, data_row, epoch, state) VALUES (?, ?, ?, 'running')"
_DROP = "UPDATE groups SET state = 'dropped', reason = ?, step = ? WHERE number = ?"
_FAIL = "INSERT INTO failures VALUES (?, ?, ?, ?)"
_FINISH = (
    "UPDATE groups SET state = 'finished', segment = ?, position = ?, size = ?, digest = ?, oldest = ? WHERE number = ?"
)


class Ledger:
    """State of every prompt group of a run, as one attempt at it writes it down. Threads may write at the same time.

    Args:
        folder: of this attempt's ledger.
        run_dir: of the run, below which all attempts' segments and checkpoints lie.

    Raises:
        DiskError: as every write: the disk is full or the folder cannot be written. What was to be written is written
            with the next flush; nothing that was committed is affected.
    """

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder = folder
        self._run_dir = run_dir
        with writing("the ledger", folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_names(folder, run_dir)
        with sqlite_errors(folder):
            self.database = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False)
            """Others only read it: an audit of the run while it goes on."""
            # Exclusive: no second process may read along, and no file is shared in memory, which network file systems
            # cannot. Write-ahead logging keeps what a killed process had committed.
            self.database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self.database.execute("PRAGMA journal_mode=WAL")
            self.database.execute("PRAGMA synchronous=NORMAL")
            self.database.executescript(SCHEMA)
        self._lock = threading.RLock()
        self._pending: deque[_Write] = deque()

    @classmethod
    def take_over(cls, folder: Path, former: Sequence[Path], run_dir: Path) -> Ledger:
        """The ledger of a new attempt, begun with a copy of the latest one; no other attempt's file is touched.

        Args:
            folder: of the new attempt's ledger.
            former: folders of the ledgers of earlier attempts, the latest last.
            run_dir: of the run.

        Raises:
            RunError: there are checkpoints, and no ledger that could say which of them count.
        """
        source = next((path for path in reversed(former) if (path / DATABASE).is_file()), None)
        is_lost = source is None or not (source / DATABASE).stat().st_size
        if is_lost and any(run_dir.glob("attempts/*/checkpoints/step-*")):
            raise RunError(
                f"the run in {run_dir} has checkpoints, and its ledger {(source or former[-1]) / DATABASE} is "
                f"{'empty' if source else 'missing'}: which of them count cannot be known",
                hints=["put a copy of it in its place; else begin another run, from model/ if it was exported"],
            )
        if source is not None and not (folder / DATABASE).is_file():
            copy_database(source, folder)
        ledger = cls(folder, run_dir)
        with sqlite_errors(folder):
            check_numbers(ledger.database)
            ledger._go_back()
        return ledger

    # What happens to groups. Kept in memory until the next flush.

    def dispatched(self, number: int, row: int, epoch: int) -> None:
        """A group was handed to its episodes."""
        self._pending.append(_Write(_DISPATCH, (number, row, epoch)))

    def dropped(self, number: int, reason: str, step: int) -> None:
        """A group will not be trained on, for this reason."""
        self._pending.append(_Write(_DROP, (reason, step, number)))

    def failed(self, number: int, sample: int, attempt: int, error: str) -> None:
        """An episode failed; `error` is its traceback."""
        self._pending.append(_Write(_FAIL, (number, sample, attempt, writable(error))))

    def ended(self, group: PromptGroup) -> None:
        """All episodes of a group have ended, and its trajectories are in its segment."""
        self._pending.append(_Write(_FINISH, (*_columns(group.record), group.oldest, group.number), group))

    def flush(self) -> list[PromptGroup]:
        """Make everything so far durable.

        Returns:
            The finished groups that are durable now and were not before, those of flushes that failed among them.
        """
        with self._lock:
            writes = list(self._pending)
            if not writes:
                return []
            with self._transaction() as database:
                for statement, values, _ in writes:
                    database.execute(statement, values)
                if failures := sum(write.statement == _FAIL for write in writes):
                    database.execute(
                        "UPDATE failures SET error = '' WHERE rowid > (SELECT max(rowid) FROM failures) - :kept - :new "
                        "AND rowid <= (SELECT max(rowid) FROM failures) - :kept",
                        {"kept": KEPT_TRACEBACKS, "new": failures},
                    )
            for _ in writes:
                self._pending.popleft()
        return [write.finished for write in writes if write.finished is not None]

    def consumed(self, numbers: Iterable[int], step: int) -> None:
        """These groups, in this order, went into the batch of `step` (0 is the first).

        Written at once; a power cut may take it, and later transactions with it.
        """
        with self._transaction() as database:
            database.executemany(
                "UPDATE groups SET state = 'consumed', step = ?, place = ? WHERE number = ?",
                [(step, place, number) for place, number in enumerate(numbers)],
            )

    def synced(self, version: int, trained: int) -> None:
        """Weights of this version, from so many trained batches, are about to generate. Written as `consumed` is."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO weight_syncs VALUES (?, ?)", (version, trained))

    def copy_into(self, target: sqlite3.Connection) -> None:
        """Copy what is written into another database."""
        with self._lock, sqlite_errors(self.folder):
            self.database.backup(target)

    # Commit and resume.

    def commit(self, step: int, checkpoint: Path, position: int) -> None:
        """`step` steps are in the checkpoint, and no group from `position` on is older than it: the commit point.

        Only then are files removed that nothing rests on any more, former attempts' among them.

        Raises:
            RunError: somebody else owns the run by now.
            DiskError: the disk refuses; all of it can be done again, also where the transaction is through.
        """
        with writing("the ledger", self.folder):
            self._commit(step, checkpoint, position)
            self._remove_what_is_done(step)

    def _commit(self, step: int, checkpoint: Path, position: int) -> None:
        if any(_attempt(path) > _attempt(self.folder.parent) for path in self._run_dir.glob("attempts/[0-9]*")):
            raise RunError(f"another process has taken over the run in {self._run_dir}; this process stops")
        name, digest = checkpoint.relative_to(self._run_dir).as_posix(), checkpoint_digest(checkpoint)
        with self._transaction() as database:
            gone = [(KEPT + str(one.step),) for one in self._kept() if not (self._run_dir / one.name).is_dir()]
            database.executemany("DELETE FROM facts WHERE name = ?", gone)
            facts = {"committed_step": step, "checkpoint": name, "committed_position": position}
            facts[f"{KEPT}{step}"] = f"{position} {name} {digest}"
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(k, str(v)) for k, v in facts.items()])
        # The commit is on the disk itself before anything that the former one rests on is removed.
        with self._lock, sqlite_errors(self.folder):
            self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove_what_is_done(self, step: int) -> None:
        """Remove segments whose groups are all committed or dropped, and what former attempts have left.

        Of this attempt, files that no row names stay: their writers may be about to tell of them.
        """
        needed = "state = 'finished' OR (state = 'consumed' AND step >= ?)"
        with self._lock:
            rows = self.database.execute(
                f"SELECT segment, MAX({needed}) FROM groups WHERE segment IS NOT NULL GROUP BY segment",
                (step,),
            ).fetchall()
            unwritten = [write.finished.record for write in list(self._pending) if write.finished is not None]
        kept = {name for name, is_needed in rows if is_needed}
        kept |= {record.segment for record in unwritten if record is not None}
        done = [(name,) for name, _ in rows if name not in kept]
        for (name,) in done:
            (self._run_dir / name).unlink(missing_ok=True)
        with self._transaction() as database:
            database.executemany("UPDATE groups SET segment = NULL WHERE segment = ?", done)
        for attempt in self._run_dir.glob("attempts/[0-9]*"):
            if _attempt(attempt) < _attempt(self.folder.parent):
                for path in (*attempt.glob("segments/*"), *attempt.glob(f"ledger/{DATABASE}*")):
                    if path.relative_to(self._run_dir).as_posix() not in kept:
                        path.unlink()

    @property
    def committed_step(self) -> int:
        """Steps in the last committed checkpoint; 0 before the first."""
        return int(self.facts().get("committed_step", 0))

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last committed checkpoint; None before the first."""
        name = self.facts().get("checkpoint")
        return None if name is None else self._run_dir / name

    @property
    def checkpoint_digest(self) -> str:
        """Of the last committed checkpoint, see `checkpoint_digest`; empty before the first."""
        return committed_digest(self.facts(), self.committed_step)

    def _kept(self) -> list[_Kept]:
        return _kept_checkpoints(self.facts())

    def _go_back(self) -> None:
        """Where somebody has put the committed checkpoint aside, go back to the one that was committed before it.

        What was consumed since is dispatched again: its trajectories are gone.
        """
        if self.checkpoint is None or self.checkpoint.is_dir():
            return
        kept = [one for one in self._kept() if (self._run_dir / one.name).is_dir()]
        if not kept:  # whoever loads it will say so
            return
        step, position, name, _ = kept[-1]
        with self._transaction() as database:
            facts = [("committed_step", step), ("checkpoint", name), ("committed_position", position)]
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", [(k, str(v)) for k, v in facts])
            later = [(f"{KEPT}{number}",) for number, *_ in self._kept() if number > step]
            database.executemany("DELETE FROM facts WHERE name = ?", later)
            database.execute(
                "UPDATE groups SET state = 'running', reason = NULL, segment = NULL, digest = NULL, step = NULL, "
                "place = NULL WHERE state = 'consumed' AND step >= ?",
                (step,),
            )

    def facts(self) -> dict[str, str]:
        """What was committed, by name."""
        return dict(self.database.execute("SELECT name, value FROM facts").fetchall())

    def rollback(self, *, discard: bool) -> None:
        """Undo what steps after the committed one did to groups; call once at the start of a resumed run.

        Args:
            discard: forget every group dispatched since the commit, so that it is generated again (deterministic mode);
                otherwise finished work stays, and only what was running is dispatched again.
        """
        step, position = self.committed_step, int(self.facts().get("committed_position", 0))
        with self._transaction() as database:
            database.execute("UPDATE groups SET state = 'finished' WHERE state = 'consumed' AND step >= ?", (step,))
            database.execute("UPDATE groups SET reason = NULL WHERE state = 'running'")
            database.execute("DELETE FROM facts WHERE name = 'closed'")
            if discard:
                database.execute("DELETE FROM groups WHERE number >= ?", (position,))

    def unfinished(self) -> list[int]:
        """Groups that were dispatched and whose fate was not recorded, in order."""
        rows = self.database.execute("SELECT number FROM groups WHERE state = 'running' ORDER BY number")
        return [number for (number,) in rows]

    def finished(self, log: Callable[[str], None] = lambda _: None) -> list[PromptGroup]:
        """Finished groups, first those that a rolled-back step had consumed, in its order.

        Those whose record is damaged or missing are not among them: they are unfinished, to be dispatched again.

        Args:
            log: told of each such group.
        """
        rows = self.database.execute(
            "SELECT number, data_row, epoch, oldest, segment, position, size, digest FROM groups "
            "WHERE state = 'finished' ORDER BY step IS NULL, step, place, number"
        ).fetchall()
        groups, damaged = [], []
        for number, row, epoch, oldest, *where in rows:
            record = Record(*where) if where[0] is not None else None
            try:
                if record is not None:
                    read_record(self._run_dir, record)
            except RunError as error:
                log(f"{error.message}: group {number} is generated again")
                damaged.append((number,))
            else:
                groups.append(PromptGroup(number, (row, epoch), record, oldest))
        with self._transaction() as database:
            database.executemany("UPDATE groups SET state = 'running', segment = NULL WHERE number = ?", damaged)
        return groups

    def position(self) -> int:
        """One more than the last group ever dispatched."""
        return int(self.database.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()[0])

    def weight_syncs(self) -> dict[int, int]:
        """For each weight version the batches trained when it was synced."""
        return dict(self.database.execute("SELECT version, trained FROM weight_syncs").fetchall())

    def close(self, interrupted: Iterable[int] = ()) -> None:
        """Write what is pending and close; safe to call twice.

        Args:
            interrupted: groups that were dispatched and have not ended; a resume dispatches them again.
        """
        with self._lock:
            try:
                self.flush()
                with self._transaction() as database:
                    database.executemany(
                        "UPDATE groups SET reason = 'interrupted' WHERE number = ? AND state = 'running'",
                        [(number,) for number in interrupted],
                    )
                    database.execute("INSERT OR REPLACE INTO facts VALUES ('closed', '1')")
            except sqlite3.ProgrammingError:  # it is closed
                return
            finally:
                self.database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """`BEGIN IMMEDIATE` to `COMMIT`, or nothing."""
        with self._lock, sqlite_errors(self.folder):
            try:
                self.database.execute("BEGIN IMMEDIATE")
                yield self.database
                self.database.execute("COMMIT")
            except BaseException:
                if self.database.in_transaction:
                    self.database.execute("ROLLBACK")
                raise


def copy_database(source: Path, target: Path) -> None:
    """Copy a ledger that nobody writes any more, complete or not at all; what stands in its write-ahead log too."""
    with replacing_folder("the ledger", target) as copy:
        copy.mkdir(parents=True)
        for path in source.glob(f"{DATABASE}*"):
            shutil.copyfile(path, copy / path.name)


_DAMAGED = "put a whole copy in its place, or move its attempt's folder away to go on from the one before it"


@contextmanager
def sqlite_errors(folder: Path) -> Iterator[None]:
    """Turn what SQLite says of a ledger into our words.

    Raises:
        DiskError: the disk refuses.
        RunError: the ledger is damaged; says what can be done.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an extended code has its primary one in the last byte
        if code in _DISK_REFUSES:
            raise refused("the ledger", folder, str(error)) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise RunError(f"the ledger {folder / DATABASE} is damaged: {error}", hints=[_DAMAGED]) from error
        raise
    except ValueError as error:
        raise RunError(f"the ledger {folder / DATABASE} is damaged: {error}", hints=[_DAMAGED]) from error


def check_numbers(database: sqlite3.Connection) -> None:
    """Raise `ValueError` where a number holds something else, which SQLite lets in."""
    for name, value in database.execute("SELECT name, value FROM facts WHERE name LIKE 'committed%'").fetchall():
        if not str(value).isdecimal():
            raise ValueError(f"{name} is {value!r:.40}, which is no whole number")
    for table in ("groups", "weight_syncs"):
        for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
            odd = f"SELECT {column} FROM {table} WHERE typeof({column}) NOT IN ('integer', 'null')"
            if kind == "INTEGER" and (found := database.execute(odd).fetchone()):
                raise ValueError(f"{table}.{column} holds {found[0]!r:.40}, which is no whole number")


def _kept_checkpoints(facts: Mapping[str, str]) -> list[_Kept]:
    """Each checkpoint that was committed and is not known to be gone, the oldest first."""
    found = [(name, *value.split(" ")) for name, value in facts.items() if name.startswith(KEPT)]
    return sorted(_Kept(int(name[len(KEPT) :]), int(place), *path) for name, place, *path in found)


def committed_digest(facts: Mapping[str, str], step: int) -> str:
    """Digest of the checkpoint that was committed at a step, see `checkpoint_digest`; empty where none is known."""
    return next((one.digest for one in _kept_checkpoints(facts) if one.step == step), "")


def checkpoint_digest(folder: Path) -> str:
    """Of what the trainer wrote down in a checkpoint, digests of all its files among it: no other one has the same."""
    path = folder / "trainer.json"
    return f"{file_digest(path):08x}" if path.is_file() else ""


def _columns(record: Record | None) -> tuple[object, ...]:
    return (None,) * 4 if record is None else (record.segment, record.offset, record.size, record.digest)


def _attempt(folder: Path) -> int:
    """The number of an attempt's folder; 0 for one that is none."""
    return int(folder.name) if folder.name.isdecimal() else 0
