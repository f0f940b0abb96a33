"""The rollout controller under load: progress, the staleness bound, one fate for every prompt."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.engines import WeightUpdate
from areal_core.errors import RunError
from areal_core.ledger.audit import audit
from areal_core.messages.rollouts import FolderNeeded, Manifest
from areal_core.rollout import controller as controller_module
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.samples import SampleLog
from areal_core.sdk import SkippedRowError
from areal_core.training.batches import token_staleness
from areal_testing.fakes import FakeEngine, FakeWorkflow
from areal_testing.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.data import Episode
    from areal_core.ledger.store import Ledger
    from areal_core.sdk import WorkflowContext

    Build = Callable[..., tuple[RolloutController, Ledger]]
    Audited = Callable[[Path], list[str]]


class Unreliable(FakeWorkflow):
    """Takes a random while, and fails now and then."""

    def __init__(self, seed: int, failing: float) -> None:
        self._draw = random.Random(seed)
        self._failing = failing

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        for _ in range(self._draw.randrange(4)):
            await asyncio.sleep(0)
        if self._draw.random() < self._failing:
            raise ConnectionError("the tool did not answer")
        episode = await super().run_episode(row, context)
        for _ in range(self._draw.randrange(4)):
            await asyncio.sleep(0)
        return episode


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.integers(0, 3),
    depth=st.integers(1, 4),
    failing=st.sampled_from([0.0, 0.1, 0.3]),
    filtering=st.sampled_from([0.0, 0.3]),
    incomplete=st.sampled_from(["replace", "use", "drop"]),
    actions=st.lists(st.sampled_from(["sync", "late sync"]), min_size=6, max_size=6),
)
def test_any_interleaving_progresses_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    staleness: int,
    depth: int,
    failing: float,
    filtering: float,
    incomplete: str,
    actions: list[str],
    build: Build,
    audited: Audited,
) -> None:
    folder = tmp_path_factory.mktemp("run")

    async def run() -> None:
        draw = random.Random(seed)
        controller, ledger = build(
            folder,
            Unreliable(seed, failing),
            keep=lambda rewards: draw.random() >= filtering,
            max_staleness=staleness,
            depth=depth,
            incomplete_groups=incomplete,
            max_consecutive_failures=10**6,
            stall_timeout_s=20,
        )
        controller.start()
        synced = {0: 0}
        for step, action in enumerate([*actions, "sync"]):
            batch, _ = await controller.next_batch(step)
            if batch is not None:
                ages = token_staleness(batch["versions"], batch["loss_mask"], synced, step)
                assert int(ages.max()) <= staleness
            trained = step + 1
            if action == "late sync":
                await asyncio.sleep(0.001)
            synced[trained] = trained
            await controller.sync(WeightUpdate(trained, folder), trained)
            under_way = controller.counts.running + controller.counts.ready
            assert under_way <= depth * 4
            assert controller.counts.consumed + under_way <= (staleness + trained + 1) * 4
        await controller.commit(0, folder / "none")
        await controller.close()
        ledger.close()

    run_virtually(run())
    assert audited(folder) == []


def test_staleness_zero_is_synchronous(tmp_path: Path, build: Build) -> None:
    async def run() -> None:
        engine = FakeEngine()
        controller, ledger = build(tmp_path, engine=engine, max_staleness=0)
        controller.start()
        for step in range(3):
            batch, metrics = await controller.next_batch(step)
            assert batch is not None
            assert metrics["staleness/max"] == 0
            assert set(batch["versions"][batch["loss_mask"]].tolist()) == {step}
            await asyncio.sleep(0.01)
            assert len(engine.requests) == 8 * (step + 1), "nothing may be generated before the next weights"
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        await controller.close()
        ledger.close()

    run_virtually(run())


@pytest.mark.parametrize(("stale", "dropped"), [("drop", True), ("mask", False), ("keep", False)])
def test_data_over_the_bound(tmp_path: Path, stale: str, dropped: bool, build: Build) -> None:
    """Weights that are synced late make waiting groups stale: each policy does what it says, and counts it."""

    async def run() -> None:
        controller, ledger = build(tmp_path, max_staleness=0, depth=2, stale=stale)
        controller.start()
        await asyncio.sleep(0.01)
        # The trainer claims to be three batches further than the weights that generated.
        ready = asyncio.ensure_future(controller.next_batch(3))
        await asyncio.sleep(0.05)
        if dropped:
            assert not ready.done(), "stale groups must not be handed out"
            await controller.sync(WeightUpdate(1, tmp_path), 3)
            batch, metrics = await ready
            assert batch is not None
            assert metrics["groups/stale"] == 4
            assert metrics["groups/stale_length_ratio"] == pytest.approx(1.0, rel=0.1)
            assert batch["loss_mask"].any()
        else:
            batch, metrics = await ready
            assert batch is not None
            assert metrics["staleness/tokens_over_bound"] == 8 * 8
            assert bool(batch["loss_mask"].any()) == (stale == "keep")
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_failures_are_retried_then_loud(tmp_path: Path, build: Build) -> None:
    class Broken:
        attempts = 0

        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            Broken.attempts += 1
            raise KeyError("no such tool")

    async def run() -> None:
        controller, ledger = build(tmp_path, Broken(), retries=2, max_consecutive_failures=3)
        controller.start()
        with pytest.raises(RunError, match=r"3 prompt groups failed.*(?s:.)*no such tool"):
            await controller.next_batch(0)
        await controller.close()
        assert Broken.attempts >= 3 * 2 * 3
        ledger.close()

    run_virtually(run())


def test_a_row_that_a_setting_skips_is_replaced_and_does_not_count_as_failed(tmp_path: Path, build: Build) -> None:
    class Skips(FakeWorkflow):
        skipped = 0

        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            if Skips.skipped < 4:
                Skips.skipped += 1
                raise SkippedRowError("too long")
            return await super().run_episode(row, context)

    async def run() -> None:
        controller, ledger = build(tmp_path, Skips(), retries=2, max_consecutive_failures=1)
        controller.start()
        _, metrics = await controller.next_batch(0)
        assert metrics["groups/filtered"] == 2
        assert metrics.get("groups/failed", 0) == 0
        assert Skips.skipped == 4, "a group has two episodes, and none is tried again"
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_a_skipped_row_neither_ends_a_series_of_failures_nor_becomes_a_sample(tmp_path: Path, build: Build) -> None:
    class Skips(FakeWorkflow):
        played = 0

        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            Skips.played += 1
            if Skips.played > 20:
                return await super().run_episode(row, context)
            if Skips.played % 2:
                raise SkippedRowError("too long")
            raise ConnectionError("the judge is down")

    async def run() -> None:
        controller, ledger = build(
            tmp_path, Skips(), batch_size=1, group_size=1, depth=1, max_staleness=0, max_consecutive_failures=8
        )
        controller._samples = SampleLog(tmp_path / "samples.jsonl")
        controller.start()
        with pytest.raises(RunError, match="8 prompt groups failed"):
            await controller.next_batch(0)
        await controller.close()
        assert not (tmp_path / "samples.jsonl").exists()
        ledger.close()

    run_virtually(run())


def test_a_server_that_needs_a_folder_is_reported_only_while_no_batch_is_ready(tmp_path: Path, build: Build) -> None:
    """After a broadcast nothing else could bring back servers that were all lost."""

    class Lost(FakeEngine):
        needs = True

        def needs_folder(self) -> bool:
            return self.needs

    async def run() -> None:
        engine = Lost(places=0)
        controller, ledger = build(tmp_path, engine=engine)
        controller.start()
        reply = await RolloutController.next_batch(controller, 0)
        assert isinstance(reply, FolderNeeded)
        engine.needs = False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(RolloutController.next_batch(controller, 0), 5)
        await controller.close()
        ledger.close()
        engine = Lost()
        controller, ledger = build(tmp_path, engine=engine)
        controller.restore(discard=False)
        controller.start()
        await asyncio.sleep(1)
        assert isinstance(await RolloutController.next_batch(controller, 0), Manifest)
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_metrics_of_an_engine_cannot_overwrite_those_of_the_run(tmp_path: Path, build: Build) -> None:
    class Counting(FakeEngine):
        def pop_metrics(self) -> dict[str, float]:
            return {"reward": -1.0, "time/wait_for_rollouts_s": -1.0, "servers/ready": 2.0, "weight_sync/pause_s": 3.0}

    async def run() -> None:
        controller, ledger = build(tmp_path, engine=Counting())
        controller.start()
        batch = await RolloutController.next_batch(controller, 0)
        assert isinstance(batch, Manifest)
        found = {name: value for name, value in batch.metrics.items() if value in (-1.0, 2.0, 3.0)}
        renamed = {"servers/reward": -1.0, "servers/time/wait_for_rollouts_s": -1.0}
        assert found == {**renamed, "servers/ready": 2.0, "weight_sync/pause_s": 3.0}
        assert batch.metrics["time/wait_for_rollouts_s"] >= 0
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_a_stall_is_an_error_with_the_counts(tmp_path: Path, build: Build) -> None:
    async def run() -> None:
        controller, ledger = build(
            tmp_path, keep=lambda rewards: False, stall_timeout_s=2.0, engine=FakeEngine(delay_s=0.01)
        )
        controller.start()
        counts = r"0 groups ready for batches of 4.*filtered, mean reward 4.75 of \d+ episodes"
        with pytest.raises(RunError, match=counts):
            await controller.next_batch(0)
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_an_episode_over_its_deadline_is_cancelled_and_replaced(tmp_path: Path, build: Build) -> None:
    class Sometimes(FakeWorkflow):
        hung = 0

        async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
            if Sometimes.hung < 1:
                Sometimes.hung += 1
                await asyncio.sleep(3600)
            return await super().run_episode(row, context)

    async def run() -> None:
        controller, ledger = build(tmp_path, Sometimes(), episode_timeout_s=0.3)
        controller.start()
        totals: Counter[str] = Counter()
        for step in range(3):
            _, metrics = await controller.next_batch(step)
            totals.update({name: int(count) for name, count in metrics.items() if name.startswith("groups/")})
            await asyncio.sleep(0.4)
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
        assert totals["groups/failed"] == 1
        await controller.close()
        ledger.close()

    run_virtually(run())


def test_a_resumed_run_trains_on_the_same_groups_in_the_same_order(
    tmp_path: Path, build: Build, audited: Audited
) -> None:
    """Consumed after the commit, finished, and running: each finds its place again, and none is lost or doubled."""

    async def first() -> list[torch.Tensor]:
        controller, _ = build(tmp_path, engine=FakeEngine(delay_s=0.002), max_staleness=3, depth=3)
        controller.start()
        batches = []
        for step in range(3):
            batch, _ = await controller.next_batch(step)
            assert batch is not None
            batches.append(batch)
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
            if step == 0:
                await controller.commit(1, tmp_path / "step-1")
        for task in list(controller._running):  # as if killed: nothing is closed or flushed
            task.cancel()
        return batches

    async def second() -> list[torch.Tensor]:
        controller, ledger = build(tmp_path, max_staleness=3, depth=3)
        controller.restore(discard=False)
        assert controller.resume_point.version == 4
        await controller.sync(WeightUpdate(controller.resume_point.version, tmp_path), 1)
        controller.start()
        batches = []
        for step in (1, 2, 3):
            batch, _ = await controller.next_batch(step)
            batches.append(batch)
            await controller.sync(WeightUpdate(4 + step, tmp_path), step + 1)
        await controller.commit(4, tmp_path / "step-4")
        await controller.close()
        ledger.close()
        return batches

    before, after = run_virtually(first()), asyncio.run(second())
    for one, other in zip(before[1:], after[:2], strict=True):
        assert torch.equal(one["group_id"], other["group_id"])
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["versions"], other["versions"])
    consumed = [g for batch in [before[0], *after] for g in batch["group_id"].unique().tolist()]
    assert len(consumed) == len(set(consumed))
    assert audited(tmp_path) == []


def test_a_filter_that_raises_ends_the_run_with_its_cause(tmp_path: Path, build: Build, audited: Audited) -> None:
    def keep(rewards: Any) -> bool:
        raise ZeroDivisionError("in the filter")

    async def run() -> None:
        controller, _ = build(tmp_path, keep=keep)
        controller.start()
        with pytest.raises(RunError, match=r"group filters failed on prompt group \d+(?s:.*)in the filter"):
            await controller.next_batch(0)
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 60))
    assert audited(tmp_path) == [], "what was interrupted is known to be"


def test_a_group_that_ends_while_the_ledger_is_written_is_not_waited_for(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "FLUSH_INTERVAL_S", 1000.0)

    async def run() -> float:
        controller, _ = build(tmp_path, engine=FakeEngine(delay_s=0.05))
        flush = controller._buffer.flush

        async def on_a_slow_disk() -> None:
            await flush()
            await asyncio.sleep(2)

        monkeypatch.setattr(controller._buffer, "flush", on_a_slow_disk)
        controller.start()
        began = asyncio.get_running_loop().time()
        await controller.next_batch(0)
        took = asyncio.get_running_loop().time() - began
        await controller.close()
        return took

    assert run_virtually(run()) < 4.5, "two flushes, and no wait between them"


def test_the_audit_finds_a_group_that_nobody_remembers(tmp_path: Path, build: Build, audited: Audited) -> None:
    """A group that was dispatched is running, finished, consumed, dropped, or known to be interrupted."""

    async def run() -> None:
        controller, _ = build(tmp_path, engine=FakeEngine(delay_s=0.05))
        controller.start()
        await controller.next_batch(0)
        await controller.sync(WeightUpdate(1, tmp_path), 1)
        with closing(sqlite3.connect(":memory:", check_same_thread=False)) as copy:
            running = await controller.copy_ledger(copy)
            assert audit(copy, tmp_path, running=running).problems == []
            lost = max(controller.open_groups)
            controller._open.discard(lost)
            (problem,) = audit(copy, tmp_path, running=running - {lost}).problems
            assert str(lost) in problem
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 60))
    (problem,) = audited(tmp_path)
    assert "have no outcome" in problem


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_commit_says_where_its_own_step_stood(tmp_path: Path, build: Build, is_late: bool) -> None:
    """More has been trained, and generated, while the checkpoint was written: a resume that discards what came after
    it begins with the first group under its own weights."""

    async def run() -> int:
        controller, _ = build(tmp_path, engine=FakeEngine(), max_staleness=0)
        controller.start()
        for step in range(3):
            await controller.next_batch(step)
            await controller.sync(WeightUpdate(step + 1, tmp_path), step + 1)
            if not is_late and step == 0:
                break
        await controller.next_batch(step + 1)
        await controller.commit(1, tmp_path / "step-1")
        await controller.close()
        again, ledger = build(tmp_path, engine=FakeEngine(), max_staleness=0)
        again.restore(discard=True)
        ledger.close()
        return again._next_number

    assert run_virtually(asyncio.wait_for(run(), 60)) == 4
