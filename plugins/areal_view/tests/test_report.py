"""A report of a run whose files are damaged."""

from __future__ import annotations

import json

import pytest

from areal_view import report

STEP = {"step": 1, "time": 1.0, "reward/mean": 0.5, "batch/sequences": 4, "time/step_s": 2.0}
GROUP = {"version": 0, "episodes": [{"text": "two", "reward": 1.0}]}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run whose config is read elsewhere."""

    class Resolved:
        name = "damaged"

        class config:
            steps = 2

    monkeypatch.setattr(report, "load_run", lambda _: Resolved)
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    return tmp_path


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else f"{json.dumps(line)}\n".encode() for line in lines))


def test_lines_that_cannot_be_read_are_left_out_and_counted(run_dir):
    garbage = [b"\xff\xfe\x00garbage\n", b"{\n", b"[1]\n", b"[" * 100_000 + b"\n", {"reward/mean": 1.0}]
    write(run_dir / "metrics.jsonl", *garbage, {"step": 1, "reward/mean": "high"}, STEP, b'{"step": 2, "ti')
    odd = [{"version": 1}, {"version": 1, "episodes": [{"text": 1, "reward": 1.0}]}, {"version": "1", "episodes": []}]
    write(run_dir / "samples.jsonl", *garbage, *odd, GROUP)
    told: list[str] = []
    page = report.write_report(run_dir, told.append).read_text()
    assert told == ["7 lines of metrics.jsonl and 8 of samples.jsonl cannot be read and are left out"]
    assert f"1 of 2 steps; {told[0]}</p>" in page
    assert "two" in page


def test_a_whole_run_has_no_such_sentence(run_dir):
    write(run_dir / "metrics.jsonl", STEP, {**STEP, "step": 2, "reward/mean": float("nan")})
    write(run_dir / "samples.jsonl", GROUP)
    told: list[str] = []
    assert "2 of 2 steps</p>" in report.write_report(run_dir, told.append).read_text()
    assert told == []


def test_a_run_of_which_no_line_can_be_read_has_nothing_to_report(run_dir):
    write(run_dir / "metrics.jsonl", b"\x00\n")
    assert report.write_report(run_dir) is None
