"""What the terminal shows is what the processes say."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from areal_core.runtime.folder import RunFolder
from areal_core.runtime.messages import ProcessStatus, RolloutStatus, RunStatus
from areal_core.runtime.progress import Progress, step_line, summarize_run
from areal_core.training.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from pathlib import Path


def metrics_logger(run: RunFolder, step: int = 0) -> MetricsLogger:
    return MetricsLogger(run.metrics, step, phase=lambda _: nullcontext())


def test_a_line_that_was_cut_off_or_spoiled_is_left_out(tmp_path: Path) -> None:
    """Also for a resume, which keeps the lines up to its step."""
    run = RunFolder(tmp_path)
    spoiled = b'\xff\xfe\n[1]\n{"reward": 1}\n{"step": "2"}\n' + b"[" * 100_000 + b"\n"
    run.metrics.write_bytes(b'{"step": 1}\n' + spoiled + b'{"step": 2}\n{"step": 3}\n{"st')
    assert run.read_metrics() == [{"step": 1}, {"step": 2}, {"step": 3}]
    metrics_logger(run, step=2).close()
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]


def test_a_line_for_each_step_with_the_time_that_is_left(tmp_path: Path) -> None:
    shown: list[str] = []
    progress = Progress(RunFolder(tmp_path), 101, shown.append)
    progress.add_step({"step": 1, "reward/all_episodes": 0.25, "time/step_s": 1.2})
    progress.add_step({"step": 2, "reward/all_episodes": float("nan"), "time/step_s": 1.2})
    progress.add_step({"step": 101, "reward/all_episodes": 0.5, "time/step_s": 1.2})
    progress.update(RunStatus)
    assert shown == ["step 1/101  reward 0.250  2.0 min left", "step 101/101  reward 0.500"]


def test_after_a_quiet_minute_a_line_shows_what_the_run_waits_for(tmp_path: Path) -> None:
    shown: list[str] = []
    progress = Progress(RunFolder(tmp_path), 2, shown.append)
    progress.on_message(RolloutStatus("3 of 8 groups"))
    processes = {"trainer-0": ProcessStatus("trainer", "here", 1, "waiting for batch 0", 0.0, "", ())}
    with mock.patch("areal_core.runtime.progress.QUIET_S", 0.0):
        progress.update(lambda: RunStatus("here", 1, 1, processes, is_ending=False))
    assert shown == ["trainer 0: waiting for batch 0; 3 of 8 groups"]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"reward/mean": 0.47, "reward/all_episodes": 0.97, "train/loss": 0.1}, "reward 0.970"),
        ({"reward/mean": 0.47, "train/loss": 0.1}, "trained reward 0.470"),
        ({"reward/all_episodes": 0.9, "evaluation/reward": 0.8}, "reward 0.900  held-out score 0.800"),
        (
            {
                "reward/all_episodes": 0.9,
                "evaluation/reward": 1.2,
                "evaluation/reward/right": 0.7,
                "evaluation/reward/short": 1.0,
            },
            "reward 0.900  held-out score 1.200  right 0.700  short 1.000",
        ),
        (
            {"reward/all_episodes": 0.9, "evaluation/reward": 0.8, "evaluation/reward/right": 0.8},
            "reward 0.900  held-out score 0.800",
        ),
        ({"train/loss": 0.6931, "train/accuracy": 0.5, "train/margin": 0.1}, "loss 0.6931  accuracy 0.500"),
        ({"train/loss": 64.0, "train/negative_log_likelihood": 2.0}, "loss 2.0000"),
        ({"reward/all_episodes": 0.0, "train/teacher_kl": 0.25}, "reward 0.000  teacher KL 0.2500"),
        ({"train/loss": 12.5}, "loss 12.5000"),
    ],
)
def test_a_step_shows_what_its_run_optimizes(metrics: dict[str, float], shown: str) -> None:
    """The reward of all that was generated, not of what a filter kept; and a loss only where there is no reward."""
    assert step_line({"step": 1, **metrics}, 2) == f"step 1/2  {shown}"


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
    many = metrics_logger(run)
    for step in range(1, 31):
        many.finish_step(step, {"train/loss": {3: 1.0, 30: 4.0}.get(step, 2.5)})
    many.close()
    assert "  loss            2.0000 -> 3.0000" in summarize_run(run, 30, 3.0), "the means of three steps"
    filtered = metrics_logger(run)
    filtered.finish_step(1, {"reward/mean": 0.5, "reward/all_episodes": 0.125})
    filtered.finish_step(2, {"reward/mean": 0.5, "reward/all_episodes": 0.875})
    filtered.finish_step(3, {"reward/mean": 0.5})
    filtered.close()
    assert "  reward          0.125 -> 0.875" in summarize_run(run, 3, 3.0)
    assert "0.5" not in summarize_run(run, 3, 3.0)
