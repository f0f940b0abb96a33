"""What the terminal shows is what the processes say."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from areal_core.driver.summary import summarize_run
from areal_core.driver.view import LastingView, PlainView, RunState, sparkline, summary_line, waiting_verdict
from areal_core.runs.folder import RunFolder
from areal_core.training.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from pathlib import Path


def metrics_logger(run: RunFolder, step: int = 0) -> MetricsLogger:
    return MetricsLogger(run.metrics, step, phase=lambda _: nullcontext())


def test_a_resume_goes_on_with_the_curve_up_to_where_it_begins(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first = metrics_logger(run)
    for step in range(1, 6):
        first.finish_step(step, {"reward/mean": step / 10})
    metrics_logger(run, 2)  # what came after step 2 is of a discarded history
    state = RunState(run)
    state.on_message("trainer", {"step": 2})
    assert [line["step"] for line in state.lines] == [1, 2]
    assert state.take_new() == []
    state.add({"step": 3, "reward/mean": 0.9})
    assert [line["step"] for line in state.take_new()] == [3]
    assert state.series("reward/mean") == [0.1, 0.2, 0.9]


def test_a_line_that_was_cut_off_or_spoiled_is_left_out(tmp_path: Path) -> None:
    """Also for a resume, which keeps the lines up to its step."""
    run = RunFolder(tmp_path)
    spoiled = b'\xff\xfe\n[1]\n{"reward": 1}\n{"step": "2"}\n' + b"[" * 100_000 + b"\n"
    run.metrics.write_bytes(b'{"step": 1}\n' + spoiled + b'{"step": 2}\n{"step": 3}\n{"st')
    assert run.read_metrics() == [{"step": 1}, {"step": 2}, {"step": 3}]
    metrics_logger(run, step=2).close()
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = RunState(RunFolder(tmp_path))
    view = PlainView(state, 2)
    state.add({"step": 1, "reward/all_episodes": 0.25})
    state.add({"step": 2, "reward/all_episodes": 0.5})
    view.update()
    assert capsys.readouterr().out.splitlines() == ["step 1/2  reward 0.250", "step 2/2  reward 0.500"]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"reward/mean": 0.47, "reward/all_episodes": 0.97, "train/loss": 0.1}, "reward 0.970"),
        ({"reward/mean": 0.47, "train/loss": 0.1}, "trained reward 0.470"),
        ({"reward/all_episodes": 0.9, "evaluation/reward": 0.8}, "reward 0.900  held-out score 0.800"),
        ({"train/loss": 0.6931, "train/accuracy": 0.5, "train/margin": 0.1}, "loss 0.6931  accuracy 0.500"),
        ({"train/loss": 64.0, "train/negative_log_likelihood": 2.0}, "loss 2.0000"),
        ({"reward/all_episodes": 0.0, "train/teacher_kl": 0.25}, "reward 0.000  teacher KL 0.2500"),
        ({"train/loss": 12.5}, "loss 12.5000"),
    ],
)
def test_a_step_shows_what_its_run_is_after(metrics: dict[str, float], shown: str) -> None:
    """The reward of all that was generated, not of what a filter kept; and a loss only where there is no reward."""
    assert summary_line({"step": 1, **metrics}, 2) == f"step 1/2  {shown}"


def test_the_summary_shows_the_same_at_both_ends(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    told = metrics_logger(run)
    told.finish_step(1, {"train/loss": 0.75, "train/accuracy": 0.5})
    told.finish_step(2, {"train/loss": 0.25, "train/accuracy": 1.0})
    told.close()
    assert summarize_run(run, 2, 3.0).splitlines() == [
        "done: 2 steps in 3 s",
        "  loss            0.7500 -> 0.2500",
        "  accuracy        0.500 -> 1.000",
    ]
    filtered = metrics_logger(run)
    filtered.finish_step(1, {"reward/mean": 0.5, "reward/all_episodes": 0.125})
    filtered.finish_step(2, {"reward/mean": 0.5, "reward/all_episodes": 0.875})
    filtered.finish_step(3, {"reward/mean": 0.5})
    filtered.close()
    assert "  reward          0.125 -> 0.875" in summarize_run(run, 3, 3.0)
    assert "0.5" not in summarize_run(run, 3, 3.0)


def test_who_waits_for_whom() -> None:
    assert "trainer waits" in waiting_verdict([{"time/wait_s": 0.9, "time/step_s": 1.0}])
    assert "rollouts wait" in waiting_verdict([{"time/wait_s": 0.01, "time/step_s": 1.0}])
    assert sparkline([0.0, 1.0]) == "▁█"


class Broken:
    """A view that cannot show."""

    def prepare(self) -> None:
        raise UnicodeEncodeError("ascii", "▁", 0, 1, "no such character")

    update = prepare


def test_a_view_that_fails_is_left_out_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = RunState(RunFolder(tmp_path))
    view = LastingView([Broken(), PlainView(state, 1), Broken()])
    state.add({"step": 1, "reward/mean": float("nan")})
    view.update()
    view.update()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Broken failed and is left out: UnicodeEncodeError")
    assert out[1:] == ["step 1/1  trained reward nan"]
    alone = LastingView([Broken()])
    alone.update()
    alone.prepare()


def test_numbers_that_are_none_and_text_that_looks_like_markup_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a true pseudo-terminal."""
    program = """
from pathlib import Path
from types import SimpleNamespace
from areal_core.runs.folder import RunFolder
from areal_core.driver.terminal import Terminal
from areal_core.driver.view import LiveView, RunState
terminal = Terminal()
state = RunState(RunFolder(Path(".")))
view = LiveView(state, SimpleNamespace(name="[/bold] x", config=SimpleNamespace(steps=3)), terminal)
state.statuses["controller"] = {"rollouts": "[/] 4 of 8", "[b": "[red"}
state.phases = {"trainer-0": "[/nothing]"}
for value in (float("nan"), float("inf"), 1.0):
    state.add({"step": 1, "reward/mean": value, "time/step_s": 0.0, "batch/tokens": 0.0, "batch/sequences": 0.0,
               "staleness/mean": value, "staleness/max": value})
view.update()
view.close()
terminal.close()
view.update()
print("SHOWN")
"""
    main, second = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=second, stderr=second, env={**os.environ, "LC_ALL": "C"}
    )
    os.close(second)
    shown = b""
    with contextlib.suppress(OSError):
        while part := os.read(main, 65536):
            shown += part
    assert process.wait(60) == 0, shown.decode(errors="replace")
    assert b"SHOWN" in shown
    assert b"4 of 8" in shown
