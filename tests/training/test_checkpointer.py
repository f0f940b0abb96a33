"""Checkpoints that are written while training continues: their contents, their commit, and their failures."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import CheckpointSection, EvaluationSection
from areal_core.disk import DiskError
from areal_core.errors import RunError
from areal_core.ledger.store import checkpoint_digest
from areal_core.runtime.rpc import PeerClosed
from areal_core.training.checkpoint import restore_checkpoint
from tests.training.loop_parts import Parts, config, metrics, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("one_rank")
PATIENCE_S = 60.0
"""Upper bound of waits that take milliseconds."""


class Snapshots(Parts):
    """An engine that makes snapshots, each written once the gate is open, and a source that opens it.

    Args:
        opens_at: step whose batch is asked for when the gate opens.
        waits: whether each batch comes only when nothing is being written any more.
        size: of a snapshot in bytes.
        others: of `Parts`.
    """

    def __init__(self, opens_at: int = 0, *, waits: bool = False, size: int = 0, **others: Any) -> None:
        super().__init__(**others)
        self._gate = threading.Event()
        self._opens_at = opens_at
        self._waits = waits
        self._size = size

    def next_batch(self, step: int) -> bytes:
        if step >= self._opens_at:
            self._gate.set()
        deadline = time.monotonic() + PATIENCE_S
        while self._waits and any(thread.name.startswith("writing of") for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "the writing never ended"
            time.sleep(0.001)
        return super().next_batch(step)

    def commit(self, step: int, checkpoint: Path) -> None:
        super().commit(step, checkpoint)
        self.asked.append(f"commit {step}")

    def snapshot_size(self) -> int:
        return self._size

    def snapshot(self) -> Callable[[Path], None]:
        trained = len(self.trained)
        self.asked.append(f"snapshot {trained}")

        def write(folder: Path) -> None:
            assert self._gate.wait(PATIENCE_S)
            self.write(folder, trained)

        return write

    def write(self, folder: Path, trained: int) -> None:
        (folder / "parameters").write_text(str(trained))


def in_order(parts: Parts, *words: str) -> bool:
    """Return whether these calls came in this order."""
    places = [parts.asked.index(word) for word in words]
    return places == sorted(places)


def test_training_goes_on_and_what_is_written_is_of_the_step(tmp_path: Path) -> None:
    """Parameters and the trainer's state are those of step 2, while steps 3 and 4 are trained."""
    parts = Snapshots(opens_at=3)
    assert train(tmp_path, parts, config(5, checkpoint=CheckpointSection(every=2)))
    assert in_order(parts, "snapshot 2", "batch 2", "batch 3", "commit 2", "snapshot 4", "commit 4", "commit 5")
    engine: Any = Parts()
    states = [restore_checkpoint(tmp_path / f"attempts/1/checkpoints/step-00000{n}", {"actor": engine}) for n in (4, 5)]
    assert engine.asked == ["load 4", "load 5"]
    assert [int(state.algorithm["batches"]) for state in states] == [4, 5]
    assert [(state.first, len(state.steps)) for state in states] == [(2, 2), (4, 1)]


def test_another_checkpoint_than_was_committed_is_refused(tmp_path: Path) -> None:
    """The checkpoint is complete and of the right step, but of another run."""
    assert train(tmp_path, Parts(), config(1, checkpoint=CheckpointSection(every=1)))
    own = tmp_path / "attempts/1/checkpoints/step-000001"
    engines: Any = {"actor": Parts()}
    restore_checkpoint(own, engines, checkpoint_digest(own))
    with pytest.raises(RunError, match=f"{own} is not the checkpoint that the run committed"):
        restore_checkpoint(own, engines, "the other's")


def test_what_is_whole_is_committed_with_the_next_step(tmp_path: Path) -> None:
    parts = Snapshots(waits=True)
    train(tmp_path, parts, config(6, checkpoint=CheckpointSection(every=2, keep=9)))
    assert in_order(parts, "snapshot 2", "batch 2", "commit 2", "batch 3", "snapshot 4", "batch 4", "commit 4")
    assert [step for step, _ in parts.committed] == [2, 4, 6]
    assert "snapshot 6" not in parts.asked, "nothing goes on after the last step"


def test_what_is_whole_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    """An evaluation may take long, and a kill in that time must not cost the steps before the checkpoint."""
    parts = Snapshots(waits=True)
    section = EvaluationSection.model_construct(every=2, at_start=False, keep_best=False)
    train(tmp_path, parts, config(4, evaluation=section, checkpoint=CheckpointSection(every=2)))
    assert in_order(parts, "snapshot 2", "batch 2", "commit 2", "evaluated", "sync 3")


def test_an_interruption_waits_for_it_and_adds_the_last_one(tmp_path: Path) -> None:
    parts = Snapshots(opens_at=3, interrupt_at=3)
    assert not train(tmp_path, parts, config(6, checkpoint=CheckpointSection(every=2)))
    assert [step for step, _ in parts.committed] == [2, 3]
    just = Snapshots(opens_at=2, interrupt_at=2)
    assert not train(tmp_path / "just", just, config(6, checkpoint=CheckpointSection(every=2)))
    assert [step for step, _ in just.committed] == [2], "it is the last one itself"


def test_training_that_fails_leaves_what_was_sound(tmp_path: Path) -> None:
    parts = Snapshots(opens_at=2, skip=True)
    with pytest.raises(RunError, match=r"not finite in 3 updates in a row"):
        train(tmp_path, parts, config(6, checkpoint=CheckpointSection(every=2)))
    assert [step for step, _ in parts.committed] == [2]


def test_a_controller_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    class Gone(Snapshots):
        def next_batch(self, step: int) -> bytes:
            if step == 3:
                raise PeerClosed("the rollout controller has died")
            return super().next_batch(step)

    parts = Gone(opens_at=9)
    with pytest.raises(PeerClosed):
        train(tmp_path, parts, config(6, checkpoint=CheckpointSection(every=2)))
    parts._gate.set()
    assert parts.committed == []


def test_a_disk_that_refuses_ends_the_run_in_its_words(tmp_path: Path) -> None:
    class Full(Snapshots):
        def write(self, folder: Path, trained: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    parts = Full(waits=True)
    with pytest.raises(DiskError, match=r"a checkpoint cannot be written to .*: the disk is full"):
        train(tmp_path, parts, config(6, checkpoint=CheckpointSection(every=2)))
    assert parts.asked[-1] == "sync 3", "it is noticed after the next step, not with the next checkpoint"
    assert parts.committed == []
    assert not list((tmp_path / "attempts/1/checkpoints").iterdir())


def test_without_memory_for_a_copy_training_waits_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_core.training.checkpointer.available_memory", lambda: 10_000_000_000)
    lines: list[str] = []
    settings = config(3, checkpoint=CheckpointSection(every=1, keep=9))
    large = Snapshots(size=8_100_000_000)
    train(tmp_path / "large", large, settings, log=lines.append)
    assert lines == [
        "training waits while checkpoints are written: a copy of 8.1 GB does not fit the 10.0 GB of host memory that "
        "are available"
    ]
    assert in_order(large, "commit 1", "batch 1", "commit 2", "batch 2", "commit 3")
    assert "snapshot 1" not in large.asked
    small = Snapshots(size=7_900_000_000)
    train(tmp_path / "small", small, settings, log=lines.append)
    assert "snapshot 1" in small.asked
    assert len(lines) == 1


@pytest.mark.parametrize(("hosts", "goes_on"), [(["a", "a"], False), (["a", "b"], True)])
def test_only_the_ranks_of_one_host_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str], goes_on: bool
) -> None:
    """Two ranks need 6 GB each, and 10 GB are free."""
    answers = {6_000_000_000: [6e9, 6e9], 10_000_000_000: [10e9, 10e9]}
    monkeypatch.setattr("areal_core.training.checkpointer.available_memory", lambda: 10_000_000_000)
    monkeypatch.setattr("areal_core.training.checkpointer.all_gather_text", lambda _: hosts)
    monkeypatch.setattr("areal_core.training.checkpointer.all_gather", answers.__getitem__)
    lines: list[str] = []
    parts = Snapshots(size=6_000_000_000)
    train(tmp_path, parts, config(2, checkpoint=CheckpointSection(every=1)), log=lines.append)
    assert ("snapshot 1" in parts.asked) == goes_on
    assert ["12.0 GB does not fit the 10.0 GB" in line for line in lines] == [True] * (not goes_on)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    parts = Snapshots()
    train(tmp_path, parts, config(3, checkpoint=CheckpointSection(every=1, asynchronous=False)))
    assert in_order(parts, "commit 1", "batch 1", "commit 2", "batch 2", "commit 3")
    assert "snapshot 1" not in parts.asked


def test_only_what_training_waits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes 10 s and a snapshot 1 s by this clock: a twentieth of the time is one every 20 s."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("areal_core.training.checkpointer.time", clock)

    class Timed(Snapshots):
        def next_batch(self, step: int) -> bytes:
            now[0] += 10
            return super().next_batch(step)

        def snapshot(self) -> Callable[[Path], None]:
            now[0] += 1
            return super().snapshot()

    parts = Timed(waits=True)
    train(tmp_path, parts, config(9, checkpoint=CheckpointSection(every_s=20, largest_share=0.05)))
    assert [step for step, _ in parts.committed] == [2, 4, 6, 8, 9]
    assert metrics(tmp_path)[2]["time/checkpoint_s"] >= 0
