"""The training loop with several roles: learners, EMAs, and what is synced and kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.errors import RunError
from areal_core.sdk import CRITIC, EMA, Role
from areal_core.training.checkpoint import restore_checkpoint
from tests.training.loop_parts import Parts, config, metrics, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.sdk import LossSpec

pytestmark = pytest.mark.usefixtures("one_rank")


def test_an_update_trains_each_role_that_has_work(tmp_path: Path) -> None:
    """Metrics of later roles have the role in their name. Each role has a folder in the checkpoint."""
    parts = Parts()
    parts.learns = ["actor", "critic"]
    train(tmp_path, parts, config(1), critic=CRITIC)
    assert parts.trained == [[0, 1, 2, 3]] * 2
    (line,) = metrics(tmp_path)
    assert (line["train/loss"], line["train/critic/loss"], line["train/prepared"]) == (1, 2, 1)
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000001"
    assert sorted(path.name for path in checkpoint.iterdir() if path.is_dir()) == ["actor", "critic"]


def test_what_engines_measured_has_a_place_of_its_own(tmp_path: Path) -> None:
    """Measurements depend on the number of ranks, and no metric `train/...` does."""

    class Measures(Parts):
        def measurements(self) -> dict[str, float]:
            return {"tokens_per_s": 10.0}

    train(tmp_path, Measures(), config(1), critic=CRITIC)
    (line,) = metrics(tmp_path)
    assert (line["engine/tokens_per_s"], line["engine/critic/tokens_per_s"]) == (10, 10)
    assert "train/tokens_per_s" not in line


def test_nothing_is_synced_while_the_first_role_does_not_learn(tmp_path: Path) -> None:
    class WarmsUp(Parts):
        def updates(self, batch: PackedBatch, context: Any) -> Iterator[list[LossSpec]]:
            self.learns = ["critic"] if context.step < 2 else ["critic", "actor"]
            return super().updates(batch, context)

    parts = WarmsUp()
    train(tmp_path, parts, config(3), critic=CRITIC)
    assert [line for line in parts.asked if line[:4] in {"sync", "skip"}] == ["skip 1", "skip 2", "sync 3"]


def test_an_average_follows_every_so_many_steps(tmp_path: Path) -> None:
    parts = Parts()
    train(tmp_path, parts, config(5), teacher=Role("teacher", ema=EMA("actor", every=2, decay=0.9)))
    assert [line for line in parts.asked if line.startswith("follow")] == ["follow with 0.9"] * 2
    assert (tmp_path / "attempts/1/checkpoints/step-000005/teacher").is_dir(), "an average cannot be made again"


def test_what_an_algorithm_keeps_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, Parts(), config(3))
    again = Parts()
    engines: Any = {"actor": again}
    state = restore_checkpoint(tmp_path / "attempts/1/checkpoints/step-000003", engines)
    assert float(state.algorithm["batches"]) == 3


def test_what_an_algorithm_keeps_may_be_any_tensor(tmp_path: Path) -> None:
    """It may be a view, or one tensor under two names. The error names a value that is no tensor."""

    class Keeps(Parts):
        def prepare(self, batch: PackedBatch, context: Any) -> PackedBatch:
            table = torch.arange(6.0).view(2, 3)
            context.state.update(turned=table.T, same=table, again=table)
            return super().prepare(batch, context)

    train(tmp_path, Keeps(), config(1))
    engines: Any = {"actor": Parts()}
    state = restore_checkpoint(tmp_path / "attempts/1/checkpoints/step-000001", engines).algorithm
    assert state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert state["same"].tolist() == state["again"].tolist() == [[0, 1, 2], [3, 4, 5]]

    class KeepsANumber(Parts):
        def prepare(self, batch: PackedBatch, context: Any) -> PackedBatch:
            context.state["coefficient"] = 0.5
            return batch

    with pytest.raises(RunError, match="the algorithm keeps 'coefficient' in its state, which is not a tensor"):
        train(tmp_path / "number", KeepsANumber(), config(1))
