"""The nodes of a run in words: in the live panel, in plain lines, and in what `areal status` prints."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rich.console import Console

from areal_core.cli.commands.status import _lines
from areal_core.messages.codec import FrameDecoder, encode_frame
from areal_core.messages.processes import Done, Owner, StopRun
from areal_core.runs import watching
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import Credentials, claim, release
from areal_core.runs.standing import MOST_NODES, node_rows
from areal_core.runs.terminal import Terminal
from areal_core.runs.view import LiveView, PlainView, RunState

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RANKS = {f"trainer-{rank}": "node-0" if rank < 4 else "node-1" for rank in range(8)}
OWNER = Owner(
    "head",
    77,
    3,
    {**dict.fromkeys(RANKS, "train"), "trainer-6": "checkpoint", "controller": "generating", "server-0": "running"},
    {**RANKS, "controller": "node-0", "server-0": "node-2", "ended": "node-2"},
    {f"node-{number}": 8 for number in range(4)},
    {"trainer-7": 12.4, "trainer-1": 5.0},
    {"node-0": 0.2, "node-1": 1.0, "node-2": 30.0, "node-3": 2.0},
)
ROWS = [
    ("node-0", "trainer 0-3: train, controller: generating"),
    ("node-1", "trainer 4-5, 7: train, trainer 6: checkpoint; silent for 12 s: trainer-7"),
    ("node-2", "server 0: running; silent for 30 s"),
    ("node-3", "nothing"),
]


def test_each_node_is_told_with_its_roles_phases_and_silence() -> None:
    (frame,) = FrameDecoder().feed(b"".join(encode_frame(OWNER)))
    assert node_rows(frame.message) == ROWS, "also after a journey"


def test_one_node_needs_no_rows() -> None:
    assert node_rows(Owner("head", 77, 3, {"trainer-0": "train"}, {"trainer-0": "a"}, {"a": 0}, {}, {"a": 0.0})) == []


def test_of_very_many_nodes_the_silent_ones_are_shown() -> None:
    silent = {f"node-{number:03d}": 1.0 for number in range(100)} | {"node-077": 25.0}
    rows = node_rows(Owner("head", 77, 3, {}, {}, {}, {}, silent))
    assert len(rows) == MOST_NODES + 1
    assert ("node-077", "nothing; silent for 25 s") in rows
    assert rows[-1] == ("84 more", "all heard 1 s ago or later")


def test_the_panel_shows_them_below_the_run(tmp_path: Path) -> None:
    state = RunState(RunFolder(tmp_path))
    assert state.is_old
    state.see(OWNER)
    assert not state.is_old
    for step in (1, 2):
        state.add({"step": step, "reward/mean": step / 4})
    resolved = SimpleNamespace(name="sums", config=SimpleNamespace(steps=4))
    terminal = Terminal()
    view = LiveView(state, resolved, terminal)  # type: ignore[arg-type]
    shown = io.StringIO()
    Console(file=shown, width=100, legacy_windows=False).print(view._panel())
    terminal.close()
    lines = [line.strip("│╭╮╰╯─ ") for line in shown.getvalue().splitlines()]
    assert lines == [
        "areal · sums · step 2/4",
        "━" * 30,
        "trained reward     0.500  ▁█",
        "trainer         train",
        "node-0          trainer 0-3: train, controller: generating",
        "node-1          trainer 4-5, 7: train, trainer 6: checkpoint; silent for 12 s: trainer-7",
        "node-2          server 0: running; silent for 30 s",
        "node-3          nothing",
        "",
    ]


def test_plain_lines_tell_of_nodes_when_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    state = RunState(RunFolder(tmp_path))
    state.see(OWNER)
    view = PlainView(state, 2, said.append)
    monkeypatch.setattr(view, "_began", -1e9)
    view.update()
    assert said == ["; ".join(f"{name}: {text}" for name, text in ROWS)]


def test_status_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_owner", lambda *_: OWNER)
    status = watching.run_status(run)
    assert status["processes"]["trainer-7"] == {"node": "node-1", "phase": "train", "silent_s": 12.4}
    assert _lines(status, tmp_path)[-5:] == [
        f"  {'owner':22s} process 77 on head",
        *(f"  {name:22s} {text}" for name, text in ROWS),
    ]


def test_node_2_stands_before_node_10() -> None:
    silent = {f"node-{number}": 1.0 for number in (10, 2, 1)}
    assert [name for name, _ in node_rows(Owner("head", 77, 3, {}, {}, {}, {}, silent))] == [
        "node-1",
        "node-2",
        "node-10",
    ]


def test_a_run_that_stops_says_which_node_it_waits_for_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_owner", lambda *_: OWNER)
    words = watching.waits_for(watching.run_status(run))
    assert words.startswith("the node node-2 is silent, and counts as lost in 30 s, ")
    assert "trainer-0 train, trainer-1 train" in words
    assert "server-0" not in words, "it stands on the silent node"
    ending = replace(OWNER, is_ending=True, awaited={"node-2": 35.2})
    monkeypatch.setattr(watching, "ask_owner", lambda *_: ending)
    status = watching.run_status(run)
    assert watching.waits_for(status) == "no word from node-2: what runs there ends within 35 s"
    assert f"  {'ending':22s} {watching.waits_for(status)}" in _lines(status, tmp_path)


def test_a_run_whose_nodes_are_missing_says_that_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_owner", lambda *_: Owner("head", 77, 1, {}, {}, {"a": 8}, {}, {"a": 0.0}))
    status = watching.run_status(run)
    assert (status["state"], status["waits_for_nodes"]) == ("running", True)
    assert _lines(status, tmp_path)[0].startswith("waiting for nodes  step 0")
    run.epoch(1).ledger.mkdir()
    assert not watching.run_status(run)["waits_for_nodes"], "its processes have ended"
    monkeypatch.setattr(watching, "ask_owner", lambda *_: OWNER)
    assert _lines(watching.run_status(run), tmp_path)[0].startswith("running  ")


def test_an_owner_that_is_stopping_is_asked_until_it_has_released_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens no more while it ends its processes, and this one, which it is here, is not gone."""
    run, asked = RunFolder(tmp_path), []

    def answer(_: object, question: object, __: float) -> object:
        asked.append(question)
        if isinstance(question, StopRun):
            return Done()
        if len(asked) == 5:
            release(run.epoch(1), "interrupted 3 143")
        return OWNER if len(asked) < 2 else None

    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_owner", answer)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    assert watching.stop_run(run, now=True, patience_s=60.0, say=lambda _: None) == "interrupted"
    assert len(asked) == 5
