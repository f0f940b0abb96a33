"""Rollout controllers for tests, over fakes and a true ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import RolloutSection
from areal_core.data.sampler import PromptSampler
from areal_core.ledger.audit import audit_folder
from areal_core.ledger.segments import SegmentWriter
from areal_core.ledger.store import Ledger
from areal_core.rewards.scoring import RewardSum
from areal_core.rollout.controller import RolloutController
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.groups import GroupRunner
from areal_core.runtime.rpc import encode_frame
from areal_core.servers import SamplingParameters
from areal_core.training.batches import read_batch
from areal_testing.fakes import CountingDataset, FakeEngine, FakeTokenizer, FakeWorkflow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.sdk import GroupFilter, RolloutWorkflow


def _ledger_folders(run_dir: Path) -> tuple[Path, list[Path]]:
    """The ledger of a new epoch, and those before it."""
    former = sorted(run_dir.glob("attempts/*/ledger"))
    return run_dir / "attempts" / f"{len(former) + 1}" / "ledger", former


def _audited(run_dir: Path) -> list[str]:
    """What an audit finds wrong; that there is no checkpoint is no matter here."""
    problems = audit_folder(_ledger_folders(run_dir)[1][-1], run_dir, PromptSampler(7, seed=3)).problems
    return [problem for problem in problems if "checkpoint" not in problem]


class Alone(GroupRunner):
    """Runs groups in the controller's own event loop, where a run has `RolloutWorkers`."""

    engine: FakeEngine

    @property
    def waiting(self) -> int:
        return len(self.engine.waiting)


class ReadController(RolloutController):
    """A controller whose batches are read as a rank of the trainer reads them."""

    folder: Path

    async def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:  # type: ignore[override]
        manifest = await super().next_batch(step)
        found = read_batch(self.folder, self.section, bytes(encode_frame(manifest)))
        return found.batch, found.metrics


def _build(
    folder: Path,
    workflow: RolloutWorkflow | None = None,
    *,
    engine: FakeEngine | None = None,
    keep: Callable[[Any], bool] | None = None,
    filters: Sequence[GroupFilter] = (),
    batch_size: int = 4,
    max_staleness: int = 1,
    depth: int = 2,
    group_size: int = 2,
    retries: int = 0,
    **policy: Any,
) -> tuple[RolloutController, Ledger]:
    ledger = Ledger.take_over(*_ledger_folders(folder), folder)
    engine = engine or FakeEngine()
    runner = EpisodeRunner(
        workflow or FakeWorkflow(),
        engine,
        RewardSum([]),
        FakeTokenizer(),
        max_retries=retries,
        on_failure=ledger.failed,
    )
    section = RolloutSection(
        batch_size=batch_size, max_staleness=max_staleness, max_pending_batches=depth, group_size=group_size, **policy
    )
    if keep is not None:
        filters = [lambda episodes: episodes if keep([e.reward for e in episodes]) else None]
    segments = SegmentWriter(ledger.folder.parent / "segments", folder, "controller", print)
    groups = Alone(runner, CountingDataset(7), None, filters, section, segments)
    groups.engine = engine
    sampling = SamplingParameters(max_new_tokens=8)
    controller = ReadController(section, groups, engine, PromptSampler(7, seed=3), sampling, ledger)
    controller.folder = folder
    return controller, ledger


@pytest.fixture(scope="session")
def build() -> Callable[..., tuple[RolloutController, Ledger]]:
    """Makes a controller and its ledger in a run folder."""
    return _build


@pytest.fixture(scope="session")
def audited() -> Callable[[Path], list[str]]:
    """Audits a run folder: what is wrong."""
    return _audited
