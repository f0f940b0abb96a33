"""The ledger: the outcome of every prompt group. No group is lost, and none is trained on twice.

A SQLite database in the attempt's folder has the state of each group and the reference to its trajectories in a
segment, which a rollout worker has synced to disk before. Only the rollout controller opens the ledger. It collects
writes and makes them durable together with `flush`. If it is killed between two flushes, a resume dispatches the groups
of the lost writes again. Writes that a full disk refused are kept for the next flush.

The disk may be slow, so the controller flushes in threads: its event loop only adds to the pending writes.

A power cut may lose the latest transactions, but never a part of one. Only `commit` waits for the disk, before it
removes anything that the previous commit needs.

A step is provisional until its checkpoint is committed. The commit point is `committed_step` in the ledger, and not the
checkpoint's folder: `rollback` returns groups that later steps consumed to `finished`, in the order of consumption.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
from collections import deque
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_core.disk import FULL_BYTES, file_digest, free_bytes, refused, replacing_folder, sync_names, writing
from areal_core.errors import RunError, writable
from areal_core.interfaces.record import Record
from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.segments import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

DATABASE = "ledger.sqlite"
_DISK_REFUSES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY,      -- the group's position in the order of the data, and its group_id
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
    place INTEGER                    -- its position among the groups that the step consumed
);
CREATE TABLE IF NOT EXISTS weight_syncs (version INTEGER PRIMARY KEY, trained INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS failures (number INTEGER, sample INTEGER, attempt INTEGER, error TEXT);
"""
KEPT = "kept "
"""Prefix of the facts about committed checkpoints. `kept STEP` has the value `POSITION FOLDER DIGEST`."""
KEPT_TRACEBACKS = 10_000
"""Number of failures whose tracebacks are kept. Older failures keep only their numbers, to bound the file's size."""


class _Kept(NamedTuple):
    """A committed checkpoint."""

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
    """State of every prompt group of a run, written by one attempt. Methods may be called from several threads.

    Every method that writes raises `DiskError` if the disk is full or the folder cannot be written. The next flush
    writes what is pending then; committed data is not affected.

    Args:
        folder: folder of this attempt's ledger.
        run_dir: folder of the run, with the segments and checkpoints of all attempts.
        keep: the trajectories of consumed groups are kept since the oldest of this many committed checkpoints; the
            initial model counts as one. None keeps all.
    """

    def __init__(self, folder: Path, run_dir: Path, keep: int | None = 1) -> None:
        self.folder = folder
        self._run_dir = run_dir
        self._keep = keep
        with writing("the ledger", folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_names(folder, run_dir)
        with sqlite_errors(folder):
            self.database = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False)
            """Other classes only read it, for the audit of a run in progress."""
            # Exclusive locking: no second process reads the file, so SQLite needs no shared memory, which network file
            # systems do not support. The write-ahead log keeps what a killed process had committed.
            self.database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self.database.execute("PRAGMA journal_mode=WAL")
            self.database.execute("PRAGMA synchronous=NORMAL")
            self.database.executescript(SCHEMA)
        self._lock = threading.RLock()
        self._pending: deque[_Write] = deque()

    @classmethod
    def take_over(cls, folder: Path, former: Sequence[Path], run_dir: Path, keep: int | None = 1) -> Ledger:
        """Create the ledger of a new attempt from a copy of the latest ledger. Files of other attempts do not change.

        Args:
            folder: folder of the new attempt's ledger.
            former: folders of the ledgers of earlier attempts, latest last.
            run_dir: folder of the run.
            keep: see `Ledger`.

        Raises:
            RunError: there are checkpoints, but no ledger that has the commits.
        """
        source = next((path for path in reversed(former) if (path / DATABASE).is_file()), None)
        is_lost = source is None or not (source / DATABASE).stat().st_size
        if is_lost and any(run_dir.glob("attempts/*/checkpoints/step-*")):
            raise RunError(
                f"the run in {run_dir} has checkpoints, but its ledger {(source or former[-1]) / DATABASE} is "
                f"{'empty' if source else 'missing'}: it records which of them are committed",
                hints=["restore the ledger from a copy, or start another run, from model/ if it was exported"],
            )
        if source is not None and not (folder / DATABASE).is_file():
            copy_database(source, folder)
        ledger = cls(folder, run_dir, keep)
        with sqlite_errors(folder):
            check_numbers(ledger.database)
            ledger._go_back()
        return ledger

    # Changes of groups. They are pending in memory until the next flush.

    def dispatched(self, number: int, row: int, epoch: int) -> None:
        """Record that a group was dispatched."""
        self._pending.append(_Write(_DISPATCH, (number, row, epoch)))

    def dropped(self, number: int, reason: str, step: int) -> None:
        """Record that a group will not be trained on, with the reason."""
        self._pending.append(_Write(_DROP, (reason, step, number)))

    def failed(self, number: int, sample: int, attempt: int, error: str) -> None:
        """Record that a try of an episode failed; `error` is the traceback."""
        self._pending.append(_Write(_FAIL, (number, sample, attempt, writable(error))))

    def ended(self, group: PromptGroup) -> None:
        """Record that all episodes of a group have ended. Its trajectories are in a segment already."""
        self._pending.append(_Write(_FINISH, (*_columns(group.record), group.oldest, group.number), group))

    def flush(self) -> list[PromptGroup]:
        """Write all pending changes.

        Returns:
            The finished groups that this flush made durable, including those of earlier flushes that failed.
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
        """Record that these groups, in this order, form the batch of `step` (the first step is 0).

        This is written immediately. A power cut may lose it together with later transactions.
        """
        with self._transaction() as database:
            database.executemany(
                "UPDATE groups SET state = 'consumed', step = ?, place = ? WHERE number = ?",
                [(step, place, number) for place, number in enumerate(numbers)],
            )

    def synced(self, version: int, trained: int) -> None:
        """Record a weight sync that is about to start: its version, and the number of batches trained before it.

        This is written immediately, like `consumed`.
        """
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO weight_syncs VALUES (?, ?)", (version, trained))

    def copy_into(self, target: sqlite3.Connection) -> None:
        """Copy everything that is written to another database."""
        with self._lock, sqlite_errors(self.folder):
            self.database.backup(target)

    # Commit and resume.

    def commit(self, step: int, checkpoint: Path, position: int) -> None:
        """Commit a checkpoint, then remove segments and files of earlier attempts that are not needed any more.

        Args:
            step: number of steps in the checkpoint.
            checkpoint: folder of the checkpoint.
            position: number of the first group that was dispatched after the checkpoint.

        Raises:
            RunError: another process has taken over the run.
            DiskError: the disk refuses. The whole call can be repeated, even if the transaction was committed.
        """
        with writing("the ledger", self.folder):
            self._commit(step, checkpoint, position)
            self._remove_what_is_done()

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
        # Sync the commit to disk before `_remove_what_is_done` removes anything that the previous commit needs.
        with self._lock, sqlite_errors(self.folder):
            self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove_what_is_done(self) -> None:
        """Remove segments whose groups are all dropped or consumed by old steps, and files of earlier attempts.

        Segments of this attempt without a reference stay, because their writers may be about to announce them.
        """
        needed = "state = 'finished' OR (state = 'consumed' AND step >= ?)"
        with self._lock:
            rows = self.database.execute(
                f"SELECT segment, MAX({needed}) FROM groups WHERE segment IS NOT NULL GROUP BY segment",
                (self._oldest_step(),),
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

    def _oldest_step(self) -> int:
        """Return the first step whose trajectories stay."""
        steps = [0, *(checkpoint.step for checkpoint in self._kept())]
        return steps[-self._keep] if self._keep is not None and self._keep <= len(steps) else 0

    @property
    def committed_step(self) -> int:
        """Number of steps in the last committed checkpoint; 0 before the first one."""
        return int(self.facts().get("committed_step", 0))

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the last committed checkpoint; None before the first one."""
        name = self.facts().get("checkpoint")
        return None if name is None else self._run_dir / name

    @property
    def checkpoint_digest(self) -> str:
        """Digest of the last committed checkpoint, see `checkpoint_digest`; empty before the first one."""
        return committed_digest(self.facts(), self.committed_step)

    def _kept(self) -> list[_Kept]:
        return _kept_checkpoints(self.facts())

    def _go_back(self) -> None:
        """Go back to the previous committed checkpoint if the folder of the last one was moved away.

        Groups consumed since then are dispatched again, because their trajectories are removed.
        """
        if self.checkpoint is None or self.checkpoint.is_dir():
            return
        kept = [checkpoint for checkpoint in self._kept() if (self._run_dir / checkpoint.name).is_dir()]
        if not kept:  # loading the missing checkpoint reports it
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
        """Return the committed facts by name."""
        return dict(self.database.execute("SELECT name, value FROM facts").fetchall())

    def rollback(self, *, discard: bool) -> None:
        """Undo the changes of groups by steps after the commit. Call it once at the start of a resumed run.

        Args:
            discard: delete every group dispatched since the commit, so that it is generated again (deterministic mode).
                Otherwise finished groups stay, and only those that were running are dispatched again.
        """
        step, position = self.committed_step, int(self.facts().get("committed_position", 0))
        with self._transaction() as database:
            database.execute("UPDATE groups SET state = 'finished' WHERE state = 'consumed' AND step >= ?", (step,))
            database.execute("UPDATE groups SET reason = NULL WHERE state = 'running'")
            database.execute("DELETE FROM facts WHERE name = 'closed'")
            if discard:
                database.execute("DELETE FROM groups WHERE number >= ?", (position,))

    def unfinished(self) -> list[int]:
        """Return the numbers of the groups that were dispatched and have no outcome, in order."""
        rows = self.database.execute("SELECT number FROM groups WHERE state = 'running' ORDER BY number")
        return [number for (number,) in rows]

    def finished(self, log: Callable[[str], None] = lambda _: None) -> list[PromptGroup]:
        """Return the finished groups. Those that a rolled-back step had consumed come first, in the step's order.

        Groups with damaged or missing records are left out and become unfinished, to be dispatched again.

        Args:
            log: writes a line to the run's log for each such group.
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
                log(f"{error.message}: generating group {number} again")
                damaged.append((number,))
            else:
                groups.append(PromptGroup(number, (row, epoch), record, oldest))
        with self._transaction() as database:
            database.executemany("UPDATE groups SET state = 'running', segment = NULL WHERE number = ?", damaged)
        return groups

    def position(self) -> int:
        """Return the number of the next group to dispatch."""
        return int(self.database.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM groups").fetchone()[0])

    def weight_syncs(self) -> dict[int, int]:
        """Return, for each weight version, the number of batches trained before it was synced."""
        return dict(self.database.execute("SELECT version, trained FROM weight_syncs").fetchall())

    def close(self, interrupted: Iterable[int] = ()) -> None:
        """Flush and close the database; safe to call twice.

        Args:
            interrupted: numbers of groups that have not ended. A resume dispatches them again.
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
            except sqlite3.ProgrammingError:  # the database is closed already
                return
            finally:
                self.database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction, and roll it back if the block raises."""
        with self._lock, sqlite_errors(self.folder):
            try:
                self.database.execute("BEGIN IMMEDIATE")
                yield self.database
                self.database.execute("COMMIT")
            except BaseException:
                if self.database.in_transaction:
                    self.database.execute("ROLLBACK")
                raise


def read_training_order(folder: Path) -> dict[tuple[int, str | None], tuple[int, int | None]]:
    """Return the data row of each prompt group, and the step that has trained on it, by its number and its digest.

    Steps count from 1 as in the metrics. A group that was not trained on has None. The digest is that of the group's
    tokens; None if none were kept.

    Args:
        folder: folder of a ledger whose run is not in progress. A copy is read.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "ledger"
        copy_database(folder, copy)
        with closing(sqlite3.connect(copy / DATABASE)) as database, sqlite_errors(folder):
            groups = database.execute("SELECT number, digest, data_row, state, step FROM groups").fetchall()
    return {
        (number, digest): (row, step + 1 if state == "consumed" else None)
        for number, digest, row, state, step in groups
    }


class Consumption(NamedTuple):
    """What the steps of a run have consumed.

    Attributes:
        steps: by step, from 0, number and record of each group in the order of consumption. The record is None if the
            group has no trajectories.
        gone: steps whose trajectories were removed.
        synced: for each weight version the number of batches trained when it was synced.
        checkpoints: committed checkpoints that still exist: steps, folder and digest of each, oldest first.
    """

    steps: dict[int, list[tuple[int, Record | None]]]
    gone: set[int]
    synced: dict[int, int]
    checkpoints: list[tuple[int, Path, str]]


def read_consumption(folder: Path, run_dir: Path) -> Consumption:
    """Read what the steps of a run have consumed, from a copy of its ledger.

    Args:
        folder: folder of a ledger whose run is not in progress.
        run_dir: folder of the run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "ledger"
        copy_database(folder, copy)
        with closing(sqlite3.connect(copy / DATABASE)) as database, sqlite_errors(folder):
            groups = database.execute(
                "SELECT step, number, segment, position, size, digest FROM groups WHERE state = 'consumed' "
                "ORDER BY step, place"
            ).fetchall()
            synced = dict(database.execute("SELECT version, trained FROM weight_syncs").fetchall())
            facts = dict(database.execute("SELECT name, value FROM facts").fetchall())
    steps: dict[int, list[tuple[int, Record | None]]] = {}
    gone = set()
    for step, number, *where in groups:
        steps.setdefault(step, []).append((number, Record(*where) if where[0] is not None else None))
        if where[0] is None and where[-1] is not None:
            gone.add(step)
    kept = [(one.step, run_dir / one.name, one.digest) for one in _kept_checkpoints(facts)]
    return Consumption(steps, gone, synced, [checkpoint for checkpoint in kept if checkpoint[1].is_dir()])


def copy_database(source: Path, target: Path) -> None:
    """Copy a closed ledger with its write-ahead log. The copy is complete or absent."""
    with replacing_folder("the ledger", target) as copy:
        copy.mkdir(parents=True)
        for path in source.glob(f"{DATABASE}*"):
            shutil.copyfile(path, copy / path.name)


_DAMAGED = "restore it from a copy, or move its attempt's folder away to continue from the attempt before"


@contextmanager
def sqlite_errors(folder: Path) -> Iterator[None]:
    """Turn SQLite's errors into errors of areal.

    Raises:
        DiskError: the disk refuses.
        RunError: the ledger is damaged.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code is the last byte
        if code in _DISK_REFUSES:
            is_full = code == sqlite3.SQLITE_FULL or free_bytes(folder) < FULL_BYTES
            raise refused("the ledger", folder, str(error), is_full=is_full) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise RunError(f"the ledger {folder / DATABASE} is damaged: {error}", hints=[_DAMAGED]) from error
        raise
    except ValueError as error:
        raise RunError(f"the ledger {folder / DATABASE} is damaged: {error}", hints=[_DAMAGED]) from error


def check_numbers(database: sqlite3.Connection) -> None:
    """Raise `ValueError` if an integer column has another type, which SQLite does not prevent."""
    for name, value in database.execute("SELECT name, value FROM facts WHERE name LIKE 'committed%'").fetchall():
        if not str(value).isdecimal():
            raise ValueError(f"{name} is {value!r:.40}, which is not an integer")
    for table in ("groups", "weight_syncs"):
        for _, column, kind, *_ in database.execute(f"PRAGMA table_info({table})").fetchall():
            odd = f"SELECT {column} FROM {table} WHERE typeof({column}) NOT IN ('integer', 'null')"
            if kind == "INTEGER" and (row := database.execute(odd).fetchone()):
                raise ValueError(f"{table}.{column} is {row[0]!r:.40}, which is not an integer")


def _kept_checkpoints(facts: Mapping[str, str]) -> list[_Kept]:
    """Return the committed checkpoints, except for those known to be removed, oldest first."""
    checkpoints = [(name, *value.split(" ")) for name, value in facts.items() if name.startswith(KEPT)]
    return sorted(_Kept(int(name[len(KEPT) :]), int(position), *rest) for name, position, *rest in checkpoints)


def committed_digest(facts: Mapping[str, str], step: int) -> str:
    """Return the digest of the checkpoint committed at a step, see `checkpoint_digest`; empty if it is not known."""
    return next((checkpoint.digest for checkpoint in _kept_checkpoints(facts) if checkpoint.step == step), "")


def checkpoint_digest(folder: Path) -> str:
    """Return a digest that identifies a checkpoint: that of `trainer.json`, which has the digests of all its files."""
    path = folder / "trainer.json"
    return f"{file_digest(path):08x}" if path.is_file() else ""


def _columns(record: Record | None) -> tuple[object, ...]:
    return (None,) * 4 if record is None else (record.segment, record.offset, record.size, record.digest)


def _attempt(folder: Path) -> int:
    """Return the number of an attempt's folder; 0 for another folder."""
    return int(folder.name) if folder.name.isdecimal() else 0
