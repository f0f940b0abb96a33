"""The nodes of a run in words: in the live panel, in plain lines, and in what `areal status` prints."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rich.console import Console

from areal_core.cli.commands.status import _lines
from areal_core.driver import status as watching
from areal_core.driver.attempts import claim, release
from areal_core.driver.describing import MOST_NODES, node_rows
from areal_core.driver.terminal import Terminal
from areal_core.driver.view import LiveView, PlainView, RunState
from areal_core.messages import Credentials, Done, FrameDecoder, encode_frame
from areal_core.messages.hub import Driving, Process, StopRun
from areal_core.runs.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def process(node: str, phase: str, silent_s: float = 0.0, role: str = "trainer") -> Process:
    return Process(role, node, 7, phase, silent_s, "", ())


PROCESSES = {f"trainer-{rank}": process("node-0" if rank < 4 else "node-1", "train") for rank in range(8)} | {
    "trainer-1": process("node-0", "train", 5.0),
    "trainer-6": process("node-1", "checkpoint"),
    "trainer-7": process("node-1", "train", 12.4),
    "controller": process("node-0", "generating", role="controller"),
    "server-0": process("node-2", "serving", 30.0, role="server"),
}
DRIVING = Driving("head", 77, 3, PROCESSES)
ROWS = [
    ("node-0", "controller: generating, trainer 0-3: train"),
    ("node-1", "trainer 4-5, 7: train, trainer 6: checkpoint; silent for 12 s: trainer-7"),
    ("node-2", "server 0: serving; silent for 30 s: server-0"),
]


def test_each_node_is_told_with_its_roles_phases_and_silence() -> None:
    (frame,) = FrameDecoder().feed(bytes(encode_frame(DRIVING)))
    assert node_rows(frame.message) == ROWS, "also after a journey"


def test_one_node_needs_no_rows() -> None:
    assert node_rows(Driving("head", 77, 3, {"trainer-0": process("a", "train")})) == []


def test_of_very_many_nodes_the_silent_ones_are_shown() -> None:
    many = {f"worker-{n}": process(f"node-{n:03d}", "x", 25.0 if n == 77 else 1.0) for n in range(100)}
    rows = node_rows(Driving("head", 77, 3, many))
    assert len(rows) == MOST_NODES + 1
    assert ("node-077", "worker 77: x; silent for 25 s: worker-77") in rows
    assert rows[-1] == ("84 more", "all heard 1 s ago or later")


def test_the_panel_shows_them_below_the_run(tmp_path: Path) -> None:
    state = RunState(RunFolder(tmp_path))
    assert state.is_old
    state.see(DRIVING)
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
        "node-0          controller: generating, trainer 0-3: train",
        "node-1          trainer 4-5, 7: train, trainer 6: checkpoint; silent for 12 s: trainer-7",
        "node-2          server 0: serving; silent for 30 s: server-0",
        "",
    ]


def test_plain_lines_tell_of_nodes_when_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    state = RunState(RunFolder(tmp_path))
    state.see(DRIVING)
    view = PlainView(state, 2, said.append)
    monkeypatch.setattr(view, "_began", -1e9)
    view.update()
    assert said == ["; ".join(f"{name}: {text}" for name, text in ROWS)]


def test_status_prints_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", lambda *_: DRIVING)
    status = watching.run_status(run)
    assert status["processes"]["trainer-7"] == {
        "role": "trainer",
        "host": "node-1",
        "pid": 7,
        "phase": "train",
        "silent_s": 12.4,
        "address": "",
        "gpus": (),
    }
    lines = _lines(status, tmp_path)
    assert f"  {'driver':22s} process 77 on head" in lines
    assert f"  {'trainer-7':22s} train  process 7 on node-1  silent for 12 s" in lines


def test_node_2_stands_before_node_10() -> None:
    some = {f"worker-{number}": process(f"node-{number}", "x") for number in (10, 2, 1)}
    names = [name for name, _ in node_rows(Driving("head", 77, 3, some))]
    assert names == ["node-1", "node-2", "node-10"]


def test_a_run_that_stops_says_what_its_processes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", lambda *_: Driving("head", 77, 3, PROCESSES, is_ending=True))
    status = watching.run_status(run)
    assert "trainer-0 train, trainer-1 train" in watching.waits_for(status)
    assert f"  {'ending':22s} {watching.waits_for(status)}" in _lines(status, tmp_path)


def test_a_driver_that_is_stopping_is_asked_until_it_has_released_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens no more while it ends its processes, and this one, which it is here, is not gone."""
    run, asked = RunFolder(tmp_path), []

    def answer(_: object, question: object, __: float) -> object:
        asked.append(question)
        if isinstance(question, StopRun):
            return Done()
        if len(asked) == 5:
            release(run.attempt(1), "interrupted 3 143")
        return DRIVING if len(asked) < 2 else None

    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    monkeypatch.setattr(watching, "ask_driver", answer)
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    assert watching.stop_run(run, now=True, patience_s=60.0, say=lambda _: None) == "interrupted"
    assert len(asked) == 5
