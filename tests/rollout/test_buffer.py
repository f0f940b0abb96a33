"""Finished groups while the disk refuses to be written."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from areal_core.disk import DiskError
from areal_core.engines import WeightUpdate
from areal_core.rollout.buffer import GroupBuffer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from areal_core.ledger.store import Ledger
    from areal_core.rollout.controller import RolloutController

    Build = Callable[..., tuple[RolloutController, Ledger]]
    Audited = Callable[[Path], list[str]]


def test_what_a_full_disk_refused_for_a_moment_is_written_and_trained_on_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build, audited: Audited
) -> None:
    """Every third write of a segment fails; nothing is lost, doubled or told as an error."""
    writes = itertools.count(1)

    def failing_write(path: Path, data: bytes) -> None:
        if next(writes) % 3 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(data)

    monkeypatch.setattr("areal_core.ledger.segments.write_durably", failing_write)

    async def run() -> list[int]:
        controller, _ = build(tmp_path)
        controller.start()
        consumed = []
        for step in range(6):
            batch, _ = await controller.next_batch(step)
            assert batch is not None
            consumed += batch["group_id"].unique().tolist()
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        await controller.close()
        return consumed

    consumed = asyncio.run(asyncio.wait_for(run(), 60))
    assert next(writes) > 4
    assert len(consumed) == len(set(consumed))
    assert audited(tmp_path) == []


def test_a_slow_commit_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    is_released = threading.Event()

    def slow_digest(_: Path) -> str:
        return "released" if is_released.wait(5) else "unreleased"

    monkeypatch.setattr("areal_core.ledger.store.checkpoint_digest", slow_digest)

    async def run() -> None:
        controller, ledger = build(tmp_path)
        checkpoint = tmp_path / "attempts/1/checkpoints/step-000000"
        checkpoint.mkdir(parents=True)
        controller.start()
        commit = asyncio.ensure_future(controller.commit(0, checkpoint))
        await controller.next_batch(0)
        is_released.set()
        await commit
        assert ledger.checkpoint_digest == "released"
        await controller.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_write_that_the_disk_refuses_once_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """`durably` keeps the disk's reason while it retries, and clears it once the write succeeds."""
    monkeypatch.setattr("areal_core.rollout.buffer.RETRY_INTERVAL_S", 0.0)
    ledger: Any = None
    buffer = GroupBuffer(ledger)
    reasons_before_write = []

    def write() -> str:
        reasons_before_write.append(buffer.refused)
        if len(reasons_before_write) == 1:
            raise DiskError("the disk is full")
        return "written"

    assert asyncio.run(buffer.durably(write)) == "written"
    assert reasons_before_write == ["", "the disk is full"]
    assert buffer.refused == ""
