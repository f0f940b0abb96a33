"""What the terminal shows is what the processes say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from areal_core.runs.folder import RunFolder
from areal_core.runs.view import PlainView, RunState, sparkline, waiting_verdict
from areal_core.training.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def journal(run: RunFolder, step: int = 0) -> Journal:
    return Journal(run.metrics, step, phase=lambda _: nullcontext())


def test_a_resume_goes_on_with_the_curve_up_to_where_it_begins(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first = journal(run)
    for step in range(1, 6):
        first.finish_step(step, {"reward/mean": step / 10})
    journal(run, 2)  # what came after step 2 is of a discarded history
    state = RunState(run)
    state.hear("trainer", {"step": 2})
    assert [line["step"] for line in state.lines] == [1, 2]
    assert state.take_new() == []
    state.add({"step": 3, "reward/mean": 0.9})
    assert [line["step"] for line in state.take_new()] == [3]
    assert state.series("reward/mean") == [0.1, 0.2, 0.9]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"st')
    assert run.read_metrics() == [{"step": 1}]


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = RunState(RunFolder(tmp_path))
    view = PlainView(state, 2)
    state.add({"step": 1, "reward/mean": 0.25})
    state.add({"step": 2, "reward/mean": 0.5})
    view.update()
    assert capsys.readouterr().out.splitlines() == ["step 1/2  reward 0.250", "step 2/2  reward 0.500"]


def test_who_waits_for_whom() -> None:
    assert "trainer waits" in waiting_verdict([{"time/wait_s": 0.9, "time/step_s": 1.0}])
    assert "rollouts wait" in waiting_verdict([{"time/wait_s": 0.01, "time/step_s": 1.0}])
    assert sparkline([0.0, 1.0]) == "▁█"
