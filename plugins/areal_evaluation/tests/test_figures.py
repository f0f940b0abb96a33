"""What is worked out of the episodes that have ended, in company and interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_core.config import resolve
from areal_core.errors import RunError
from areal_evaluation.evaluation import Episodes, EvaluationOptions, compute_figures, for_evaluation
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected
from areal_evaluation.report import write_page


def line(row, sample, reward, **facts):
    """An episode that has ended well."""
    return {
        "row": row,
        "sample": sample,
        "seconds": 0.5 * (2 * row + sample + 1),
        "reward": reward,
        "rewards": {"exact": reward},
        "tokens": 10 * (row + 1),
        "truncated": bool(row),
        "prompt": "1+1=",
        "completion": "2",
        **facts,
    }


def failed(row, sample):
    return {"row": row, "sample": sample, "seconds": 4.0, "error": "ValueError: no nines"}


@pytest.fixture
def resolved(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    return for_evaluation(resolve("run.yaml", [], []), samples_per_prompt=2, limit=2)


@pytest.fixture
def episodes(tmp_path):
    """Of an evaluation of two prompts with two answers each; `shown` is what the terminal was told."""
    shown = []
    made = Episodes(tmp_path / "samples.jsonl", lambda *said: shown.append(said), "starting the engine")
    made.shown = shown
    made.show()
    made.on_message(EpisodesExpected(4))
    made.show()
    return made


def test_figures_are_those_of_the_episodes(resolved, episodes, tmp_path):
    for said in (line(0, 0, 1.0), line(0, 1, 0.0), line(1, 0, 1.0), line(1, 1, 1.0)):
        episodes.on_message(EpisodePlayed(said))
        episodes.show()
    figures = compute_figures(resolved, episodes, EvaluationOptions(ks=[1, 2]))
    assert figures["complete"]
    assert (figures["episodes"], figures["finished"], figures["failed"]) == (4, 4, 0)
    assert figures["reward"]["value"] == figures["pass_at_k"]["1"]["value"] == 0.75
    assert figures["pass_at_k"]["2"]["value"] == 1.0
    assert figures["rewards"] == {"exact": 0.75}
    assert (figures["response_length"], figures["truncated"]) == (15.0, 0.5)
    assert (figures["seconds"], figures["tokens_per_s"], figures["episodes_per_s"]) == (2.0, 30.0, 2.0)
    assert set(figures["config"]) >= {"evaluation", "sampling", "seed"}
    assert episodes.shown[:2] == [("starting the engine", 0, 0), ("generating", 0, 4)]
    assert episodes.shown[-1] == ("reward 0.750", 4, 4)
    written = [json.loads(text) for text in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [each["completion"] for each in written] == ["2"] * 4


def test_failed_episodes_are_counted_and_left_out_of_every_other_figure(resolved, episodes):
    for said in (line(0, 0, 1.0), failed(0, 1), line(1, 0, 0.0)):
        episodes.on_message(EpisodePlayed(said))
    episodes.show()
    figures = compute_figures(resolved, episodes, EvaluationOptions(ks=[1, 2]), [2])
    assert not figures["complete"]
    assert (figures["finished"], figures["failed"]) == (2, 1)
    assert figures["reward"]["value"] == 0.5
    assert figures["pass_at_k"]["2"] is None
    assert episodes.shown[-1] == ("reward 0.500, 1 failed", 3, 4)


def test_without_an_episode_that_ended_well_there_are_no_figures(resolved, episodes):
    with pytest.raises(RunError, match="interrupted before the first episode ended") as interrupted:
        compute_figures(resolved, episodes, EvaluationOptions(), [2])
    assert interrupted.value.exit_code == 130
    episodes.on_message(EpisodePlayed(failed(0, 0)))
    with pytest.raises(RunError, match="all 1 episodes failed; the last one:\nValueError: no nines"):
        compute_figures(resolved, episodes, EvaluationOptions())


def test_figures_by_category_are_those_of_its_rows(resolved, tmp_path):
    episodes = Episodes(tmp_path / "samples.jsonl", lambda *_: None, "", {0: "easy", 1: "hard", 2: "hopeless"})
    for said in (line(0, 0, 1.0), line(0, 1, 0.0), line(1, 0, 0.0), failed(1, 1), failed(2, 0)):
        episodes.on_message(EpisodePlayed(said))
    found = compute_figures(resolved, episodes, EvaluationOptions(ks=[1, 2], category="kind"))["categories"]
    assert {name: (own["finished"], own["failed"]) for name, own in found.items()} == {
        "easy": (2, 0),
        "hard": (1, 1),
        "hopeless": (0, 1),
    }
    assert found["easy"]["pass_at_k"]["2"]["value"] == 1.0
    assert (found["hard"]["reward"]["value"], found["hard"]["pass_at_k"]["2"]) == (0.0, None)
    assert found["hopeless"]["reward"] is None
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["category"] == "easy"


def test_failures_are_counted_by_their_last_line_or_by_what_was_said_of_them(resolved, episodes):
    traces = ["data row 0 (counted from 0), sample 1: Traceback:\n  File x\nValueError: no nines", "data row 3: slow"]
    for said in (line(0, 0, 1.0), *({**failed(1, n), "error": text} for n, text in enumerate([*traces, traces[0]]))):
        episodes.on_message(EpisodePlayed(said))
    episodes.on_message(EpisodePlayed({**failed(1, 9), "cause": "the endpoint answered 500: no room"}))
    told = compute_figures(resolved, episodes, EvaluationOptions())["failures"]
    assert told == {"ValueError: no nines": 2, "slow": 1, "the endpoint answered 500: no room": 1}
    assert next(iter(told)) == "ValueError: no nines"


def test_what_no_text_can_hold_takes_no_report_away(resolved, episodes, tmp_path):
    """Half of a surrogate pair, as a model may cut one off; the figures were lost behind the page."""
    episodes.on_message(EpisodePlayed(line(0, 0, 1.0, conversations=[[{"role": "assistant", "text": "\ud800 4"}]])))
    figures = {
        **compute_figures(resolved, episodes, EvaluationOptions(ks=[1])),
        "name": "sums",
        "model": "m",
        "endpoint": "",
    }
    write_page(tmp_path / "report.html", figures, tmp_path / "samples.jsonl")
    assert "\\ud800 4" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_disk_that_is_full_takes_no_figure_away(resolved):
    episodes = Episodes(Path("/dev/full"), lambda *_: None, "")
    episodes.on_message(EpisodePlayed(line(0, 0, 1.0)))
    assert "No space left" in str(episodes.refusal)
    assert compute_figures(resolved, episodes, EvaluationOptions())["reward"]["value"] == 1.0
