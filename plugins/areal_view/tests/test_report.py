"""What a report shows, also of a run whose files are damaged."""

from __future__ import annotations

import json
import re

import pytest

from areal_view import report
from areal_view.chart import Series, line_chart
from areal_view.page import render_page

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


def titles(*lines, tag="h2"):
    page = render_page("run", len(lines), lines, [], "")
    return re.findall(f"<{tag}>(.*?)</{tag}>", page)


def test_a_run_without_rewards_has_its_own_metrics_drawn():
    """What pairs log has no chart of its own; each gets a small one, once."""
    pairs = {"step": 1, "train/loss": 0.69, "train/accuracy": 0.5, "train/gradient_norm": 1.0, "train/margin": -0.1}
    assert titles(pairs) == [
        "Gradient norm",
        "Where the trainer's time goes",
        "train/accuracy",
        "train/loss",
        "train/margin",
    ]


def test_other_metrics_are_grouped_by_role():
    line = {"step": 1, "train/critic/loss": 0.3, "train/reward_kl": 0.1, "reward/std": 0.2, "batch/tokens": 5.0}
    line |= {"agents/calls": 1.0, "agents/malformed_calls": 0.1, "agents/turns": 2.0, "agents/chat_requests": 2.0}
    drawn = ["agents/calls", "agents/malformed_calls", "agents/turns"]
    assert titles(line, tag="h3") == ["train", "train/critic", "agents", "reward"]
    assert titles(line)[-6:] == ["train/reward_kl", "train/critic/loss", *drawn, "reward/std"]


def test_a_value_that_is_no_number_spoils_no_chart():
    lines = [{"step": step, "train/ratio": value} for step, value in enumerate((1.0, float("nan"), float("inf"), 2.0))]
    page = render_page("run", 4, lines, [], "")
    assert "train/ratio" in page
    assert "nan" not in page
    assert "inf" not in page


def test_the_reward_is_that_of_every_episode():
    """A filter leaves the hard half in the batch, and shaping takes from it: neither is how well the policy does."""
    page = render_page("run", 1, [{"step": 1, "reward/mean": 0.47, "reward/all_episodes": 0.97}], [], "")
    assert "<b>0.97 → 0.97</b><span>reward</span>" in page
    assert "0.47 →" not in page


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, -1e300])
def test_a_curve_of_one_value_is_drawn(value):
    drawn = line_chart([Series("rate", [(1.0, value), (2.0, value)])])
    assert "polyline" in drawn
    assert "nan" not in drawn
    assert "inf" not in drawn
