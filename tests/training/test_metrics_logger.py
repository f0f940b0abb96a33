"""What the trainer tells the outside world, when the outside world fails."""

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


def test_a_tracker_that_fails_is_switched_off_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken:
        calls = 0

        def start(self, run_dir: Path, settings: Any) -> None:
            return

        def log(self, step: int, values: Any) -> None:
            Broken.calls += 1
            raise ConnectionError("no network")

        def close(self) -> None:
            return

    told: list[str] = []
    metrics_logger = MetricsLogger(
        tmp_path / "m.jsonl", 0, trackers=[Broken()], phase=lambda _: nullcontext(), log=told.append
    )
    metrics_logger.finish_step(1, {})
    metrics_logger.finish_step(2, {})
    metrics_logger.close()
    assert Broken.calls == 1
    assert told == ["tracker Broken is switched off: ConnectionError: no network"]


def test_a_tracker_that_blocks_keeps_no_other_from_its_calls_and_its_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blocks:
        def __init__(self) -> None:
            self.release, self.seen = threading.Event(), list[str]()

        def start(self, run_dir: Path, settings: Any) -> None:
            self.release.wait()

        def log(self, step: int, values: Any) -> None:
            self.seen.append(f"step {step}")

        def close(self) -> None:
            self.seen.append("closed")

    monkeypatch.setattr("areal_core.training.aside.WAITING", 2)
    monkeypatch.setattr("areal_core.training.metrics_logger.PATIENCE_S", 0.0)
    blocked, other, told = Blocks(), Blocks(), list[str]()
    other.release.set()
    metrics_logger = MetricsLogger(
        tmp_path / "m.jsonl", 0, trackers=[blocked, other], phase=lambda _: nullcontext(), log=told.append
    )
    metrics_logger.start_trackers(tmp_path, {})
    for step in range(1, 5):
        metrics_logger.finish_step(step, {})
        while f"step {step}" not in other.seen:
            time.sleep(0.001)
    metrics_logger.close()
    while other.seen[-1] != "closed":
        time.sleep(0.001)
    assert other.seen == ["step 1", "step 2", "step 3", "step 4", "closed"]
    assert any("tracker Blocks has blocked" in line for line in told)
    blocked.release.set()
    while not blocked.seen or blocked.seen[-1] != "closed":
        time.sleep(0.001)
    assert blocked.seen[0] == "step 1"


def test_metrics_wait_for_a_disk_that_is_full_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter([True, True, False])

    def append_line(what: str, path: Path, line: str) -> None:
        if next(refusals, False):
            raise DiskError(f"{what} cannot be written")
        path.open("a").write(f"{line}\n")

    monkeypatch.setattr("areal_core.training.metrics_logger.append_line", append_line)
    told: list[str] = []
    metrics_logger = MetricsLogger(tmp_path / "m.jsonl", 0, phase=lambda _: nullcontext(), log=told.append)
    metrics_logger.finish_step(1, {"loss": 2.0})
    metrics_logger.finish_step(2, {})
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [1, 2]
    assert told == ["the metrics cannot be written; retrying for 60 s"]


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
