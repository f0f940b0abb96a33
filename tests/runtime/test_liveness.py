"""Silence is logged; processes that are silent or in one phase for too long hang."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.runtime import liveness
from areal_core.runtime.hub import Process
from areal_core.runtime.liveness import Liveness
from areal_core.runtime.messages import Heartbeat, Join

if TYPE_CHECKING:
    import pytest


class Watch:
    """One process under watch, with a clock that the test moves in steps of a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.messages: list[str] = []
        monkeypatch.setattr(liveness.time, "monotonic", lambda: self.now)
        group = ProcessGroup("server-0", "server", ["-"])
        loop = asyncio.new_event_loop()
        self.process = Process(group, 0, Place("here"), 1, {}, Path("log"), ended=loop.create_future())
        loop.close()
        self.process.join = Join("server-0", 0, "here", 7, sees_run=True)
        self.liveness = Liveness(self.messages.append)

    def beat(self, phase: str, seconds: float, limit_s: float) -> None:
        self.process.beat = Heartbeat(phase, seconds, limit_s, silence_s=60.0)
        self.process.heard_at = self.now

    def check(self, seconds: int) -> list[str]:
        """Check every second. Return the reasons why the process hangs."""
        reasons = []
        for _ in range(seconds):
            self.now += 1.0
            reasons += [reason for _, reason in self.liveness.find_hanging([self.process])]
        return reasons


def test_silence_is_logged_once_and_ends_with_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.beat("train", 0.0, 0.0)
    assert watch.check(30) == []
    watch.beat("train", 30.0, 0.0)
    assert watch.check(1) == []
    assert watch.messages == ["server-0 has been silent for 11 s (phase train)", "server-0 responds again"]


def test_a_process_is_lost_after_as_much_silence_as_its_phase_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.beat("train", 0.0, 0.0)
    assert watch.check(60) == []
    assert watch.check(1) == ["has been silent for 61 s (phase train): it is considered lost"]


def test_a_process_hangs_that_is_in_one_phase_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.beat("load", 99.0, 100.0)
    assert watch.check(1) == []
    watch.beat("load", 101.0, 100.0)
    assert watch.check(1) == ["hangs: it has been in the phase 'load' for 101 s, and its limit is 100 s"]


def test_silence_while_the_driver_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.beat("train", 0.0, 0.0)
    watch.now += 600.0
    assert watch.check(1) == []
    assert watch.messages == []
