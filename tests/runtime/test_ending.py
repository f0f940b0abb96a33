"""How a run ends whose trainer had nothing to keep yet."""

from __future__ import annotations

import asyncio
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.runs import controller
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.settings import LocalSettings
from areal_testing.conformance.launchers import driven

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_controller_is_stopped_with_a_trainer_that_was_stopped_while_it_started(tmp_path: Path) -> None:
    """A controller that no trainer had spoken to was waited for until patience was over."""

    async def run() -> None:
        launcher = LocalLauncher(LocalSettings(fork_server=False))
        async with driven(launcher, tmp_path / "run", 60.0) as session:
            await session.driver.start([session.group("main"), session.group("controller")])
            await session.report_of("main")
            await session.report_of("controller")
            session.driver.signals.append(signal.SIGTERM)
            code = await session.driver.watch("main", lambda: None)
            assert code == ASKED_TO_STOP
            await session.driver.end_others(code)
            assert "controller" not in session.processes()

    asyncio.run(run())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_controller_ends_when_it_is_told_to_whether_a_trainer_had_come_or_had_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    monkeypatch.setenv("AREAL_SCRATCH", str(tmp_path))
    monkeypatch.setattr(controller, "LOST_S", 3600.0)
    monkeypatch.setattr(controller, "watch_event_loop", lambda *_: None)
    monkeypatch.setattr("gc.freeze", lambda: None)
    entered: list[str] = []

    async def run() -> None:
        async def nothing(*_: Any) -> None:
            pass

        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        started.set_result(None)
        service: Any = SimpleNamespace(
            done=asyncio.Event(), is_lost=is_lost, serve_trainer=nothing, status=SimpleNamespace
        )
        if is_lost:
            service.done.set()
        member: Any = SimpleNamespace(
            phase=lambda _: nullcontext(),
            announce=lambda *_: None,
            enter=entered.append,
            notify=lambda _: None,
            log=print,
        )
        half: Any = SimpleNamespace(starting=started)
        config: Any = SimpleNamespace(rollout=SimpleNamespace(blocked_timeout_s=60.0))
        rollouts: Any = SimpleNamespace(close=nothing)
        serving = asyncio.ensure_future(controller._serve_trainer(service, rollouts, half, config, member))
        while len(entered) < 1 + is_lost:  # generating, and waiting to be stopped
            await asyncio.sleep(0.01)
        assert not serving.done()
        await asyncio.to_thread(member.on_stop)
        async with asyncio.timeout(60):
            await serving

    asyncio.run(run())
