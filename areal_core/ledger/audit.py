"""`areal audit`: compare the ledger with the trainer's consumption log and with the order of the data set."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.data.digest import chain_digests
from areal_core.disk import changed_files
from areal_core.errors import RunError
from areal_core.interfaces.record import Record
from areal_core.ledger import store
from areal_core.ledger.segments import read_record

if TYPE_CHECKING:
    from collections.abc import Container

    from areal_core.data.sampler import PromptSampler

GroupRow = tuple[int, int, int, str, str | None, str | None, int | None, int | None]


@dataclass(slots=True)
class Audit:
    """The result of an audit.

    Attributes:
        committed_step: number of steps in the last committed checkpoint.
        groups: number of groups in each state.
        provisional: number of consumed groups of steps after the commit. A resume trains on them again.
        problems: all contradictions; empty if the run is clean.
    """

    committed_step: int
    groups: dict[str, int]
    provisional: int = 0
    problems: list[str] = field(default_factory=list)


def audit_folder(ledger: Path, run_dir: Path, sampler: PromptSampler | None = None, *, generates: bool = True) -> Audit:
    """Audit a run that is not in progress. It reads a copy of the ledger and changes nothing in the run folder.

    Args:
        ledger: folder of the latest ledger.
        run_dir: folder of the run.
        sampler: order of the data set; None skips the check of the order.
        generates: whether the run has rollouts. In fine-tuning the trainer reads the rows in order, and the ledger has
            only commits.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "ledger"
        store.copy_database(ledger, copy)
        with closing(sqlite3.connect(copy / store.DATABASE)) as database, store.sqlite_errors(ledger):
            try:
                return audit(database, run_dir, sampler, generates=generates)
            except (sqlite3.OperationalError, ValueError) as error:
                return Audit(0, {}, problems=[f"{ledger / store.DATABASE} is damaged or of another version: {error}"])


def audit(
    database: sqlite3.Connection,
    run_dir: Path,
    sampler: PromptSampler | None = None,
    running: Container[int] | None = None,
    *,
    generates: bool = True,
) -> Audit:
    """Check that every prompt group has exactly one fate, and that both halves of the run agree on it.

    Args:
        database: database of the ledger.
        run_dir: folder of the run.
        sampler: order of the data set; None skips the check of the order.
        running: numbers of the groups that the rollout controller is running; None if the run is not in progress.
        generates: see `audit_folder`.
    """
    store.check_numbers(database)
    facts = dict(database.execute("SELECT name, value FROM facts").fetchall())
    rows: list[GroupRow] = database.execute(
        "SELECT number, data_row, epoch, state, reason, digest, step, place FROM groups ORDER BY number"
    ).fetchall()
    records = database.execute(
        "SELECT segment, position, size, digest FROM groups WHERE state = 'finished' AND segment IS NOT NULL"
    ).fetchall()
    states = Counter(f"{row[3]}: {row[4]}" if row[4] else row[3] for row in rows)
    result = Audit(int(facts.get("committed_step", 0)), dict(states))
    result.provisional = sum(row[3] == "consumed" and (row[6] or 0) >= result.committed_step for row in rows)
    _check_numbers(rows, result)
    _check_fates(rows, facts, running, result)
    _check_order(rows, sampler, result)
    unknown = database.execute(
        "SELECT DISTINCT oldest FROM groups WHERE oldest > 0 AND oldest NOT IN (SELECT version FROM weight_syncs)"
    ).fetchall()
    result.problems += [f"groups were sampled by version {version}, which was never synced" for (version,) in unknown]
    try:
        state = _read_checkpoint(run_dir, facts, result, reads_all=running is None)
        if state is not None:
            _check_consumption_log(state, rows if generates else None, result)
    except (OSError, ValueError, LookupError, TypeError) as error:
        path = run_dir / facts["checkpoint"] / "trainer.json"
        result.problems.append(f"{path} is damaged or of another version: {type(error).__name__}: {error}")
    if running is None:
        for record in records:
            try:
                read_record(run_dir, Record(*record))
            except RunError as error:
                result.problems.append(error.message)
    return result


def _check_numbers(rows: list[GroupRow], audit: Audit) -> None:
    """Numbers have no gap, and each step consumed its groups at distinct places."""
    numbers = [row[0] for row in rows]
    missing = sorted(set(range(len(numbers))) - set(numbers))
    if missing:
        audit.problems.append(f"groups were never dispatched although later ones were: {missing[:10]}")
    places = Counter((row[6], row[7]) for row in rows if row[3] == "consumed")
    audit.problems += [f"two groups have place {place} of step {step}" for (step, place), n in places.items() if n > 1]


def _check_fates(rows: list[GroupRow], facts: dict[str, str], running: Container[int] | None, audit: Audit) -> None:
    """A group without a fate is in flight, or was when its process was killed, or was interrupted and is retried."""
    undecided = [number for number, _, _, state, reason, *_ in rows if state == "running" and reason is None]
    if running is not None:
        lost = [number for number in undecided if number not in running]
    else:
        lost = undecided if "closed" in facts else []
    if lost:
        audit.problems.append(f"groups were dispatched and have no outcome: {lost[:10]}")


def _check_order(rows: list[GroupRow], sampler: PromptSampler | None, audit: Audit) -> None:
    """Check that each group has the data row that its number maps to, so that no row comes twice in an epoch."""
    counts = Counter((row[1], row[2]) for row in rows)
    repeated = ((row, epoch, count) for (row, epoch), count in counts.items() if count > 1)
    audit.problems += [f"row {row} was dispatched {count} times in epoch {epoch}" for row, epoch, count in repeated]
    if sampler is None:
        return
    for number, row, epoch, *_ in rows:
        expected_row, expected_epoch = sampler[number]
        if (row, epoch) != (expected_row, expected_epoch):
            audit.problems.append(
                f"group {number} has row {row} of epoch {epoch}, not {expected_row} of {expected_epoch}"
            )


def _read_checkpoint(run_dir: Path, facts: dict[str, str], audit: Audit, *, reads_all: bool) -> dict[str, Any] | None:
    """Return the trainer's state in the committed checkpoint; None if there is no checkpoint. Note what is wrong."""
    if "checkpoint" not in facts:
        return None
    path = run_dir / facts["checkpoint"] / "trainer.json"
    if not path.is_file():
        audit.problems.append(f"the committed checkpoint is missing: {path.parent}")
        return None
    state: dict[str, Any] = json.loads(path.read_text())
    if state["step"] != audit.committed_step:
        audit.problems.append(
            f"the checkpoint has step {state['step']}, and the ledger has step {audit.committed_step}"
        )
    audit.problems += changed_files(path.parent, state.get("files", {}), state.get("digests") if reads_all else None)
    if store.committed_digest(facts, audit.committed_step) not in ("", store.checkpoint_digest(path.parent)):
        audit.problems.append(f"{path.parent} is not the checkpoint that the run committed")
    return state


def _check_consumption_log(state: dict[str, Any], rows: list[GroupRow] | None, audit: Audit) -> None:
    """Check that the groups consumed up to the commit are those that the trainer read, by number and digest."""
    if rows is None:
        numbers = [number for groups in state["steps"] for number, _ in groups]
        if numbers != [*range(min(numbers, default=0), max(numbers, default=-1) + 1)]:
            audit.problems.append("the trainer skipped rows or trained on them twice")
        return
    ledger: dict[int, dict[int, str]] = {}
    for number, _, _, group_state, _, digest, step, _ in rows:
        if group_state == "consumed" and step is not None and digest is not None:
            ledger.setdefault(step, {})[number] = digest
    before, first = "", int(state["first"])
    for step in range(first):
        before = chain_digests(before, ledger.get(step, {}).items())
    if before != state["before"]:
        audit.problems.append(f"ledger and trainer disagree on what was trained on in steps 0 to {first - 1}")
    for step, groups in enumerate(state["steps"], first):
        logged = {int(number): digest for number, digest in groups}
        recorded = ledger.get(step, {})
        if logged.keys() != recorded.keys():
            odd = sorted(logged.keys() ^ recorded.keys())[:10]
            audit.problems.append(f"step {step}: ledger and trainer disagree on which groups were trained on: {odd}")
        changed = [n for n in logged.keys() & recorded.keys() if logged[n] != recorded[n]]
        if changed:
            audit.problems.append(
                f"step {step}: trajectories of groups {sorted(changed)[:10]} differ from the ledger's"
            )
    times = Counter(int(number) for groups in state["steps"] for number, _ in groups)
    audit.problems += [f"group {number} was trained on {n} times" for number, n in times.items() if n > 1]
