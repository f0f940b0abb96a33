"""`Run.samples`: which answers a step has learned from, also in a run that was resumed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from areal_core.interfaces.record import Record
from areal_core.ledger.groups import PromptGroup
from areal_core.ledger.store import DATABASE, SCHEMA
from areal_core.library.run import Run
from areal_core.messages.workflows import EpisodeShown, GroupOutcome
from areal_core.rollout.samples import SampleLog
from areal_core.runtime.folder import Outcome, RunFolder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_step_shows_what_it_has_learned_from_and_no_group_that_a_crash_has_lost(tmp_path: Path) -> None:
    """A resume gives the numbers of lost groups to new ones, and the log keeps the lines of both."""
    run = RunFolder(tmp_path)
    log = SampleLog(run.samples)
    for version, (text, digest) in enumerate([("lost", "00000001"), ("trained on", "00000002")]):
        outcome = GroupOutcome((1.0,), {}, (EpisodeShown(text, 1.0, {}),), 1, "", is_kept=True)
        log.saw(PromptGroup(5, (3, 0), Record("segment", 0, 9, digest)), outcome, version)
    ledger = tmp_path / "attempts" / "2" / "ledger"
    ledger.mkdir(parents=True)
    with closing(sqlite3.connect(ledger / DATABASE)) as database:
        database.executescript(SCHEMA)
        columns = "number, data_row, epoch, state, digest, step"
        database.execute(f"INSERT INTO groups ({columns}) VALUES (5, 3, 0, 'consumed', '00000002', 6)")
        database.commit()
    (ledger.parent / "released").write_text(str(Outcome("done", 8)))
    run.config.write_text("steps: 8\n")
    (trained,) = Run(tmp_path).samples(step=7)
    assert (trained["answer"], trained["data_row"]) == ("trained on", 3)
    assert [row["step"] for row in Run(tmp_path).samples()] == [None, 7]
