"""Clocks of episodes run only while the engines can generate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from areal_core.interfaces import WeightUpdate
from areal_core.testing.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from areal_core.ledger.store import Ledger
    from areal_core.rollout.controller import RolloutController

    Build = Callable[..., tuple[RolloutController, Ledger]]
    Audited = Callable[[Path], list[str]]


def test_clocks_stand_still_while_the_engines_cannot_generate(tmp_path: Path, build: Build) -> None:
    """Trainer and servers on one GPU in turns: the time without memory is not the episode's."""

    class SlowEngine(FakeEngine):
        may_go_on = asyncio.Event()

        async def generate(self, request: Any) -> Any:
            await self.may_go_on.wait()
            return await super().generate(request)

        async def update_weights(self, update: WeightUpdate) -> None:
            await super().update_weights(update)
            self.may_go_on.set()

    async def run() -> None:
        controller, ledger = build(tmp_path, engine=SlowEngine(), episode_timeout_s=0.5)
        controller.start()
        controller.stop_clocks()
        await asyncio.sleep(1.5)
        await controller.publish(WeightUpdate(1, tmp_path), 0)
        batch, _ = await controller.next_batch(0)
        assert batch is not None
        assert ledger.database.execute("SELECT COUNT(*) FROM failures").fetchone() == (0,)
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))
