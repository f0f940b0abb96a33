"""Which groups are logged, and how values of several updates and ranks are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load, save

from areal_core.data import PackedBatch, Ragged
from areal_core.sdk import LossResult, LossSpec
from areal_core.training import token_log
from areal_core.training.token_log import ROW, TokenLog

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("one_rank")
LENGTHS = [2, 3, 1, 2]


def batch_of(rewards: list[float]) -> PackedBatch:
    """Return a batch of four sequences in two groups."""
    count = sum(LENGTHS)
    tokens = {
        "input_ids": torch.arange(count),
        "logprobs": torch.full((count,), -0.5),
        "versions": torch.tensor([-1, 3, -1, 3, 3, 3, -1, 3], dtype=torch.int32),
        "wide": torch.zeros(count, 2),
    }
    sequences = {"group_id": torch.tensor([5, 5, 9, 9]), "reward": torch.tensor(rewards)}
    return PackedBatch(Ragged(torch.tensor(LENGTHS), tokens), sequences)


def compute(log: TokenLog, rows: list[int], value: float) -> None:
    """Make an update on some of the sequences, whose loss has a term for each token."""

    def loss(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        found = {"loss": torch.full((part.token_count,), value), "of_rows": torch.zeros(len(part) + 100)}
        return LossResult(torch.zeros(()), {}, found)

    (work,) = log.watch([LossSpec("actor", log.batch.select(rows), ("logprobs",), loss)])
    work.loss(work.batch, {"logprobs": torch.full((work.batch.token_count,), -value)})


@pytest.mark.parametrize(
    ("rewards", "groups", "chosen"),
    [([1, 1, 0, 1], 1, {9}), ([0, 1, 1, 1], 1, {5}), ([1, 1, 1, 1], 1, {5}), ([1, 1, 0, 1], 7, {5, 9})],
)
def test_groups_in_which_rewards_differ_come_first(rewards: list[float], groups: int, chosen: set[int]) -> None:
    log = TokenLog(batch_of(rewards), groups)
    compute(log, [0, 1, 2, 3], 1.0)
    logged = log.gather()
    assert logged is not None
    assert {*logged["group_id"].tolist()} == chosen
    assert ROW not in logged
    assert "wide" not in logged
    assert "of_rows" not in logged


def test_nothing_is_kept_where_no_group_is_logged() -> None:
    log = TokenLog(batch_of([0, 1, 0, 1]), 0)
    assert ROW not in log.batch
    compute(log, [0, 1, 2, 3], 1.0)
    assert log.gather() is None


def test_what_no_loss_has_seen_is_missing_and_the_behavior_has_a_name_of_its_own() -> None:
    log = TokenLog(batch_of([0, 1, 0, 1]), 2)
    compute(log, [3, 0], 1.0)
    logged = log.gather()
    assert logged is not None
    missing = [False] * 2 + [True] * 4 + [False] * 2
    assert logged["loss"].isnan().tolist() == missing
    assert logged["logprobs"].isnan().tolist() == missing, "that of the sampling policy is not the one that learns"
    assert logged["behavior_logprobs"].isnan().tolist() == [True, False, True, False, False, False, True, False]


def test_the_last_update_counts_whichever_rank_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log = TokenLog(batch_of([0, 1, 0, 1]), 2)
    compute(log, [0, 1], 1.0)
    compute(log, [2, 3], 2.0)
    compute(log, [3, 2], 3.0)
    compute(log, [1, 0], 4.0)

    def two_ranks(payload: bytes) -> list[bytes]:
        """Divide the values: the second rank made the first update, and the first rank the later ones."""
        values = load(payload)
        older = {key: value for key, value in values.items() if key.startswith("1/")}
        return [save({key: value for key, value in values.items() if key not in older}), save(older)]

    monkeypatch.setattr(token_log, "gather_bytes", two_ranks)
    logged = log.gather()
    assert logged is not None
    assert logged["loss"].tolist() == [4.0] * 5 + [3.0] * 3


def test_ranks_send_the_logged_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They once sent the micro-batches of which the sequences are views: half a gigabyte a step."""
    log = TokenLog(batch_of([1, 1, 0, 1]), 1)
    compute(log, [0, 1, 2, 3], 1.0)
    sent: list[bytes] = []

    def gather_bytes(payload: bytes) -> list[bytes]:
        sent.append(payload)
        return [payload]

    monkeypatch.setattr(token_log, "gather_bytes", gather_bytes)
    log.gather()
    shapes = {key: tuple(value.shape) for key, value in load(sent[0]).items()}
    assert shapes == {f"1/{row}/{name}": (LENGTHS[row],) for row in (2, 3) for name in ("loss", "logprobs")}
