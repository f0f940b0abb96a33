"""The ledger when things go wrong: a full disk, and segments that are no longer needed."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch

from areal_core.data import PackedBatch, Trajectory
from areal_core.errors import RunError
from areal_core.ledger.store import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def batch_of(numbers: list[int], tokens: int = 8) -> tuple[list[tuple[int, range]], PackedBatch]:
    """A group of one sequence for each number."""
    trajectories = [
        Trajectory(
            {
                "input_ids": torch.full((tokens,), number),
                "loss_mask": torch.ones(tokens, dtype=torch.bool),
                "logprobs": torch.zeros(tokens),
                "versions": torch.zeros(tokens, dtype=torch.int32),
                "turn_ids": torch.zeros(tokens, dtype=torch.int32),
            },
            {"group_id": torch.tensor(number), "oldest_version": torch.tensor(0, dtype=torch.int32)},
        )
        for number in numbers
    ]
    return [(n, range(i, i + 1)) for i, n in enumerate(numbers)], PackedBatch.from_trajectories(trajectories)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path) -> None:
    ledger = Ledger(small_disk)
    ledger.issued(0, 0, 0)
    ledger.flush(*batch_of([0]))
    for number in (1, 2):
        ledger.issued(number, number, 0)
    with pytest.raises(RunError, match="the disk is full"):
        ledger.flush(*batch_of([1, 2], tokens=20_000))
    assert [group.number for group in ledger.finished()] == [0]
    again = Ledger(small_disk)
    assert [group.number for group in again.finished()] == [0]


def test_segments_go_when_their_groups_are_committed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(4):
        ledger.issued(number, number, 0)
    ledger.flush(*batch_of([0, 1]))
    ledger.flush(*batch_of([2, 3]))
    ledger.consumed([0, 1], step=0)
    ledger.commit(1, "step-1", 4)
    assert len(list(ledger.folder.glob("*.safetensors"))) == 1
    ledger.consumed([2], step=1)
    ledger.commit(1, "step-1", 4)
    groups = ledger.finished()
    assert [g.number for g in groups] == [3]
    ledger.rollback(discard=False)
    groups = ledger.finished()
    assert [g.number for g in groups] == [2, 3], "what a discarded step consumed comes first"
    assert groups[0].batch is not None
    assert groups[0].batch.select(list(groups[0].rows))["input_ids"].unique().tolist() == [2]


def test_a_segment_is_whole_before_it_is_named(tmp_path: Path) -> None:
    """A process killed between segment and transaction leaves a file that no row names; it is never read."""
    ledger = Ledger(tmp_path)
    ledger.issued(0, 0, 0)
    ledger.flush()
    (ledger.folder / "000000000.safetensors").write_bytes(os.urandom(100))
    again = Ledger(tmp_path)
    assert again.unfinished() == [0]
    again.flush(*batch_of([0]))
    assert [g.number for g in again.finished()] == [0]
