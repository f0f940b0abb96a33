"""How a run ends whose trainer had nothing to keep yet."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from areal_core.driver.attempts import release
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.member import ASKED_TO_STOP
from areal_core.launchers.settings import LocalSettings
from areal_core.testing.conformance.launchers import Session, member_group

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_who_waits_for_a_trainer_that_was_stopped_while_it_started_is_stopped_too(tmp_path: Path) -> None:
    """A controller that no trainer had spoken to was waited for until patience was over."""

    async def run() -> None:
        session = Session(LocalLauncher(LocalSettings(fork_server=False)), tmp_path / "run", 60.0)
        try:
            await session.begin()
            await session.driver.start([member_group("main"), member_group("controller")])
            await session.told("main")
            await session.told("controller")
            session.driver.signals.append(signal.SIGTERM)
            code = await session.driver.watch("main", lambda: None)
            assert code == ASKED_TO_STOP
            await session.driver.end_others(code)
            assert "controller" not in session.processes()
        finally:
            await session.driver.close()
            release(session.run.attempt(1), "done 1")

    asyncio.run(run())
