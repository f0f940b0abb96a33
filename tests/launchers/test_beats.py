"""How often nodes and processes beat: less often where they are many, and never so seldom that they seem silent."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.launchers import supervised
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.launchers.supervised import beat_interval
from areal_core.messages import Credentials
from areal_core.runs.silence import TOLD_S
from areal_core.runs.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path


def test_many_beat_less_often_and_never_so_seldom_that_they_seem_silent() -> None:
    intervals = [beat_interval(count) for count in (0, 10, 200, 400, 1000, 100_000)]
    assert intervals == [1.0, 1.0, 1.0, 2.0, 5.0, 5.0]
    assert 2 * max(intervals) <= TOLD_S


@pytest.mark.slow
def test_a_warden_and_a_process_beat_as_often_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "BEATS_PER_S", 0.25)  # one is many: a beat in 4 s

    async def work() -> None:
        launcher = LocalLauncher(LocalSettings())
        supervisor = Supervisor(launcher, Credentials.create(1), lambda name: tmp_path / name, print, print)
        try:
            await supervisor.listen()
            await supervisor.bring_nodes(tmp_path)
            (node,) = supervisor.spread(1, None)
            await asyncio.sleep(5.0)  # until it is told
            heard = set()
            for _ in range(80):
                heard.add(node.heard)
                await asyncio.sleep(0.1)
            assert len(heard) <= 4, "every second there would be eight"
            show = [sys.executable, "-c", "import os; print(os.environ['AREAL_BEAT_S'])"]
            first = supervisor.start(ProcessSpecification("first", "test", show, speaks=True))
            assert (await first.wait()).last_words == "4.0"
        finally:
            await supervisor.close()

    asyncio.run(asyncio.wait_for(work(), 120))
