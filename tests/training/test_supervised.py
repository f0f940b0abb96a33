"""Batches of a data set's own completions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from areal_core.disk import DiskError
from areal_core.testing.fakes import CountingDataset, FakeTokenizer
from areal_core.training.supervised import SupervisedSource

if TYPE_CHECKING:
    from pathlib import Path


def test_a_commit_waits_for_a_disk_that_is_full_for_a_moment(tmp_path: Path) -> None:
    committed: list[tuple[int, Path, int]] = []
    refusals = iter([True, True, False])

    def commit(*asked: Any) -> None:
        if next(refusals):
            raise DiskError("the ledger cannot be written")
        committed.append(asked)

    config: Any = SimpleNamespace(seed=0, shuffle=False, rollout=SimpleNamespace(batch_size=4))
    ledger: Any = SimpleNamespace(commit=commit)
    told: list[str] = []
    source = SupervisedSource(CountingDataset(), FakeTokenizer(), config, ledger, lambda: False, told.append)
    source.commit(2, tmp_path)
    assert committed == [(2, tmp_path, 8)]
    assert told == ["the ledger cannot be written; it is tried again for 60 s"]
