"""What the trainer tells the outside world, when the outside world fails."""

from __future__ import annotations

import errno
import json
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
