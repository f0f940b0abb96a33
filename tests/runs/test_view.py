"""What the terminal shows is read from files that other processes write, cut off and replace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal_core.training.journal import Journal
from areal_core.runs.view import RunState, sparkline, waiting_verdict

if TYPE_CHECKING:
    from pathlib import Path


def test_a_resume_replaces_the_metrics_and_the_view_starts_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 10, 0, [], lambda _: None)
    state = RunState(tmp_path)
    for step in range(1, 6):
        journal.step_done(step, {"reward/mean": step / 10})
    assert [line["step"] for line in state.read()] == [1, 2, 3, 4, 5]
    resumed = Journal(tmp_path, 10, 2, [], lambda _: None)
    for step in range(3, 9):  # grown past the old length before the view looks again, with lines of other lengths
        resumed.step_done(step, {"reward/mean": step / 10, "another/metric": 1.0})
    state.read()
    assert [line["step"] for line in state.lines] == list(range(1, 9))


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path, state = tmp_path / "metrics.jsonl", RunState(tmp_path)
    path.write_text('{"step": 1}\n{"st')
    assert state.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert state.read() == [json.loads('{"step": 2}')]


def test_who_waits_for_whom() -> None:
    assert "trainer waits" in waiting_verdict([{"time/wait_s": 0.9, "time/step_s": 1.0}])
    assert "rollouts wait" in waiting_verdict([{"time/wait_s": 0.01, "time/step_s": 1.0}])
    assert sparkline([0.0, 1.0]) == "▁█"
