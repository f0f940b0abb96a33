"""What the page is told of a run, also of one whose files are damaged."""

from __future__ import annotations

import json

import pytest

from areal_core.errors import UsageError
from areal_view import page
from areal_view.timeline import Span, Track, in_flight, lanes, latest, one_after_another, read_timeline, united

STEP = {"step": 1, "time": 1.0, "reward/mean": 0.5, "batch/sequences": 4, "time/step_s": 2.0}
GROUP = {"version": 0, "episodes": [{"text": "two", "reward": 1.0}]}


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run whose config is read elsewhere."""

    class Resolved:
        name = "damaged"

        class config:
            steps = 2

    monkeypatch.setattr(page, "load_run", lambda _: Resolved)
    monkeypatch.setattr(page, "_facts", lambda *_: [])
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    return tmp_path


def write(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(line if isinstance(line, bytes) else f"{json.dumps(line)}\n".encode() for line in lines))


def test_lines_that_cannot_be_read_are_left_out_and_counted(run_dir):
    garbage = [b"\xff\xfe\x00garbage\n", b"{\n", b"[1]\n", b"[" * 100_000 + b"\n", {"reward/mean": 1.0}]
    write(run_dir / "metrics.jsonl", *garbage, {"step": 1, "reward/mean": "high"}, STEP, b'{"step": 2, "ti')
    odd = [{"version": 1}, {"version": 1, "episodes": [{"text": 1, "reward": 1.0}]}, {"version": "1", "episodes": []}]
    write(run_dir / "samples.jsonl", *garbage, *odd, GROUP)
    write(run_dir / "logs" / "controller.jsonl", *garbage, {"group": 1}, {"group": "1", "begin": 1, "end": 2})
    write(run_dir / "logs" / "servers.jsonl", *garbage, {"server": "a"})
    write(run_dir / "diagnostics.jsonl", *garbage, {"step": 1, "text": 5})
    data = page.run_data(run_dir)
    assert data["notes"] == ["left out 7 lines of metrics.jsonl and 8 of samples.jsonl: unreadable"]
    assert (data["metrics"]["step"], data["samples"], data["diagnostics"]) == ([1], [GROUP], [])
    assert data["timeline"]["tracks"] == []
    assert "two" in page.page(data)


def test_a_run_without_metrics_has_no_page(run_dir):
    write(run_dir / "metrics.jsonl", b"\x00\n")
    assert page.run_data(run_dir) is None
    assert page.write_report(run_dir) is None


def test_a_number_that_is_none_is_null_and_a_script_cannot_be_ended(run_dir):
    write(run_dir / "metrics.jsonl", STEP, {**STEP, "step": 2, "reward/mean": float("nan"), "a": float("inf")})
    write(run_dir / "samples.jsonl", {"version": 0, "episodes": [{"text": "</script><script>x", "reward": 1.0}]})
    data = json.loads(told := page.as_json(page.run_data(run_dir)))
    assert data["metrics"]["columns"]["reward/mean"] == [0.5, None]
    assert data["metrics"]["columns"]["a"] == [None, None]
    assert "</script" not in told
    assert page.page(page.run_data(run_dir)).count("</script>") == (page.STATIC / "view.html").read_text().count(
        "</script>"
    )


def test_charts_are_those_that_the_run_has_numbers_for():
    line = {"step": 1, "train/negative_log_likelihood": 1.0, "time/wait_s": 1.0, "staleness/share_10": 0.0}
    charts = {chart["title"]: chart["keys"] for chart in page._charts([line, {"staleness/share_2": 1.0}])}
    assert charts == {
        "Loss": ["train/negative_log_likelihood"],
        "Staleness histogram": ["staleness/share_2", "staleness/share_10"],
        "Where the trainer's time goes": ["time/wait_s"],
    }


def test_lanes_are_as_few_as_there_are_spans_at_once():
    spans = [Span(0, 4, "a"), Span(1, 2, "b"), Span(2, 3, "c"), Span(4, 5, "d"), Span(0.5, 1, "e")]
    found = lanes(spans)
    assert [[span.name for span in lane] for lane in found] == [["a"], ["e", "b", "c", "d"]]
    assert united([Span(0, 2, "x"), Span(1, 3, "x"), Span(5, 6, "x")]) == [Span(0, 3, "x"), Span(5, 6, "x")]
    assert one_after_another([Span(1, 3, "b"), Span(0, 1.5, "a")]) == [Span(0, 1, "a"), Span(1, 3, "b")]
    kept = latest([Track("p", "t", spans[:2]), Track("q", "t", spans[2:])], 3)
    assert [[span.name for span in track.spans] for track in kept] == [["b"], ["c", "d"]]


def test_groups_in_flight_are_counted_by_their_version():
    groups = [{"group": n, "version": n // 2, "begin": float(n), "end": n + 2.0} for n in range(4)]
    found = in_flight([*groups, {"group": -1, "version": 0, "begin": 0.0, "end": 9.0}])
    assert (found["versions"], found["time"][0], found["time"][-1]) == ([0, 1], 0.0, 5.0)
    at = {round(time, 1): [counts[place] for counts in found["counts"]] for place, time in enumerate(found["time"])}
    assert (at[0.5], at[1.5], at[2.5], at[3.5], at[4.5]) == ([1, 0], [2, 0], [1, 1], [0, 2], [0, 1])
    assert in_flight([])["time"] == []


def test_a_server_is_in_a_state_until_the_next(tmp_path):
    states = ["starting", "ready", "updating", "ready", "lost"]
    write(
        tmp_path / "logs" / "servers.jsonl",
        *({"time": float(n), "server": "s", "state": state, "version": 0} for n, state in enumerate(states)),
    )
    (track,), _ = read_timeline(tmp_path / "logs")
    names = ["starting", "ready", "held", "ready"]
    assert [(span.begin, span.end, span.name) for span in track.spans] == [(n, n + 1, m) for n, m in enumerate(names)]


def test_of_a_long_run_every_evaluation_is_drawn(run_dir):
    lines = [
        {"step": step, "train/loss": 0.5} | ({"evaluation/reward": 1.0} if step % 100 == 0 else {})
        for step in range(9000)
    ]
    write(run_dir / "metrics.jsonl", *lines)
    metrics = page.run_data(run_dir)["metrics"]
    assert sum(value is not None for value in metrics["columns"]["evaluation/reward"]) == 90
    assert len(metrics["step"]) < 2200


def test_a_page_is_made_where_the_config_cannot_be_read(tmp_path):
    write(tmp_path / "metrics.jsonl", STEP)
    (tmp_path / "config.yaml").write_text("steps: 2\nplugins: [nowhere]\n")
    data = page.run_data(tmp_path)
    assert data["notes"][0].startswith("the config cannot be read here: ")
    assert (data["name"], data["steps"], data["facts"]) == (tmp_path.name, 1, [])


def test_a_damaged_file_of_tokens_is_left_out(run_dir):
    write(run_dir / "metrics.jsonl", STEP)
    write(run_dir / "rollouts" / "step-000001.parquet", b"PAR1")
    data = page.run_data(run_dir)
    assert data["notes"] == ["left out the tokens of the steps [1]: unreadable"]
    assert ({*map(len, data["sequences"].values())}, data["rollouts"]) == ({0}, {})


def test_runs_are_compared_by_step_and_by_their_settings(run_dir):
    write(run_dir / "metrics.jsonl", *({**STEP, "step": step, "reward/all_episodes": 0.1 * step} for step in (1, 2)))
    other = run_dir / "other" / "second"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("steps: 5\nalgorithm:\n  loss: grpo/reinforce\n")
    write(other / "metrics.jsonl", *({"step": step, "time": 9.0, "reward/all_episodes": 0.5} for step in (2, 4)))
    data = page.run_data(run_dir, others=[other])
    columns = data["metrics"]["columns"]
    assert data["metrics"]["step"] == [1, 2, 4]
    assert columns["reward/all_episodes"] == pytest.approx([0.1, 0.2, None])
    assert columns["reward/all_episodes · second"] == [None, 0.5, 0.5]
    (chart,) = (chart for chart in data["charts"] if chart["title"] == "Reward")
    assert chart["keys"] == ["reward/all_episodes", "reward/all_episodes · second"]
    name = run_dir.name
    assert data["facts"] == [
        ("algorithm.loss", f"{name}: not set; second: grpo/reinforce"),
        ("steps", f"{name}: 2; second: 5"),
    ]
    path = page.write_report(run_dir, others=[other])
    assert path.name == "comparison.html"
    with pytest.raises(UsageError, match=r"nothing to compare with: .*nowhere has no metrics"):
        page.run_data(run_dir, others=[run_dir / "nowhere"])


def test_runs_whose_folders_have_one_name_are_called_by_their_paths(run_dir):
    write(run_dir / "metrics.jsonl", STEP)
    others = [run_dir / place / "same" for place in ("a", "b")]
    for other in others:
        other.mkdir(parents=True)
        write(other / "metrics.jsonl", STEP)
    assert page.run_data(run_dir, others=others)["others"] == [str(other) for other in others]
