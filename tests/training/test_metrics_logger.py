"""What the trainer reports, where trackers, plugins or disks fail."""

from __future__ import annotations

import errno
import json
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.disk import DiskError
from areal_core.training.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from pathlib import Path


class BlockingTracker:
    """A tracker whose `start` does not return until it is released; it notes its calls."""

    def __init__(self) -> None:
        self.release, self.calls = threading.Event(), list[str]()
        self.is_closed = threading.Event()

    def start(self, run_dir: Path, settings: Any) -> None:
        self.calls.append("start")
        self.release.wait()

    def log(self, step: int, values: Any) -> None:
        self.calls.append(f"step {step}")

    def log_batch(self, step: int, batch: Any) -> None:
        self.calls.append(f"batch {step}")

    def close(self) -> None:
        self.calls.append("close")
        self.is_closed.set()

    def wait_for(self, call: str) -> None:
        while call not in self.calls:
            time.sleep(0.001)


def make_logger(folder: Path, *trackers: Any, lines: list[str]) -> MetricsLogger:
    return MetricsLogger(folder / "m.jsonl", 0, trackers=trackers, phase=lambda _: nullcontext(), log=lines.append)


def test_a_tracker_that_fails_is_switched_off_and_closed(tmp_path: Path) -> None:
    class Broken(BlockingTracker):
        def log(self, step: int, values: Any) -> None:
            super().log(step, values)
            raise ConnectionError("no network")

    lines: list[str] = []
    broken = Broken()
    metrics_logger = make_logger(tmp_path, broken, lines=lines)
    metrics_logger.finish_step(1, {})
    metrics_logger.finish_step(2, {})
    metrics_logger.close()
    assert broken.calls == ["step 1", "close"]
    assert lines == ["tracker Broken is switched off: ConnectionError: no network"]


def test_a_tracker_that_blocks_keeps_no_other_from_its_calls_and_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_core.training.metrics_logger.QUEUE_SIZE", 2)
    monkeypatch.setattr("areal_core.training.metrics_logger.CLOSING_S", 0.0)

    class Other(BlockingTracker):
        """A name of its own in the log."""

    blocked, other, lines = BlockingTracker(), Other(), list[str]()
    other.release.set()
    metrics_logger = make_logger(tmp_path, blocked, other, lines=lines)
    metrics_logger.start_trackers(tmp_path, {})
    blocked.wait_for("start")
    for step in range(1, 5):
        metrics_logger.finish_step(step, {})
        other.wait_for(f"step {step}")
    metrics_logger.close()
    other.is_closed.wait()
    assert other.calls == ["start", "step 1", "step 2", "step 3", "step 4", "close"]
    dropping, ending = (line.partition(" s; ") for line in lines if "tracker BlockingTracker has blocked for" in line)
    assert dropping[2] == "dropping its oldest calls"
    assert ending[2] == "the run ends without 2 queued calls"
    blocked.release.set()
    blocked.is_closed.wait()
    assert blocked.calls == ["start", "step 4", "close"]
    assert lines[-1] == "tracker BlockingTracker responds again; 3 calls were dropped"


def test_a_tracker_that_is_behind_gets_no_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_core.training.metrics_logger.MAX_WAITING_FOR_BATCH", 1)
    tracker: Any = BlockingTracker()
    batch: Any = object()
    metrics_logger = make_logger(tmp_path, tracker, lines=[])
    metrics_logger.start_trackers(tmp_path, {})
    tracker.wait_for("start")
    for step in range(1, 5):
        metrics_logger.batch_logged(step, batch)
    tracker.release.set()
    metrics_logger.close()
    assert tracker.calls == ["start", "batch 1", "batch 2", "close"]


def test_metrics_wait_for_a_disk_that_is_full_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([True, True, False])

    def append_line(what: str, path: Path, line: str) -> None:
        if next(refusals, False):
            raise DiskError(f"{what} cannot be written")
        path.open("a").write(f"{line}\n")

    monkeypatch.setattr("areal_core.training.metrics_logger.append_line", append_line)
    lines: list[str] = []
    metrics_logger = MetricsLogger(tmp_path / "m.jsonl", 0, phase=lambda _: nullcontext(), log=lines.append)
    metrics_logger.finish_step(1, {"loss": 2.0})
    metrics_logger.finish_step(2, {})
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2]
    assert lines == ["the metrics cannot be written; retrying for 60 s"]


def test_metrics_that_a_resume_keeps_are_synced_or_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path, lines = tmp_path / "m.jsonl", '{"step": 1}\n{"step": 2}\n{"step'
    path.write_text(lines)
    with monkeypatch.context() as broken:
        broken.setattr("areal_core.disk.os.fsync", fsync)
        with pytest.raises(DiskError, match="the metrics cannot be written"):
            MetricsLogger(path, 1, phase=lambda _: nullcontext())
    assert path.read_text() == lines
    MetricsLogger(path, 1, phase=lambda _: nullcontext())
    assert path.read_text() == '{"step": 1}\n'
