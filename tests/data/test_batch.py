"""Nothing is lost, padded or reordered inside a sequence, whatever is done to a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.data import PackedBatch, Ragged, Trajectory, shift_to_predictions


def trajectory(length: int, seed: int, turns: int) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int) -> torch.Tensor:
        return torch.randint(0, high, (length,), generator=generator)

    return Trajectory(
        tokens={
            "input_ids": integers(1000),
            "loss_mask": integers(2).bool(),
            "logprobs": torch.rand(length, generator=generator),
            "versions": integers(9).int(),
            "turn_ids": integers(4).int(),
            "image_features": torch.rand(length, 3, generator=generator),  # a declared extra key, of two dimensions
        },
        sequence={"reward": torch.tensor(float(seed)), "prompt_id": torch.tensor([seed, 0])},
        turns={"turn_reward": torch.rand(turns, generator=generator)},
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for level in ("tokens", "sequence", "turns"):
        left, right = getattr(one, level), getattr(other, level)
        assert left.keys() == right.keys()
        for key in left:
            assert left[key].dtype == right[key].dtype
            assert np.array_equal(left[key], right[key]), key


trajectories = st.lists(
    st.builds(trajectory, st.integers(1, 12), st.integers(0, 10_000), st.integers(1, 3)), min_size=1, max_size=8
)


@settings(max_examples=60)
@given(trajectories, st.randoms())
def test_every_stage_keeps_every_value(originals: list[Trajectory], random: object) -> None:
    batch = PackedBatch.from_bytes(PackedBatch.from_trajectories(originals).to_bytes())
    for one, other in zip(originals, batch.to_trajectories(), strict=True):
        assert_same(one, other)
    order = list(range(len(originals)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for one, other in zip([originals[i] for i in order], batch.select(order).to_trajectories(), strict=True):
        assert_same(one, other)
    doubled = PackedBatch.concatenate([batch, batch.select(order)])
    for one, other in zip([*originals, *(originals[i] for i in order)], doubled.to_trajectories(), strict=True):
        assert_same(one, other)


@settings(max_examples=40)
@given(trajectories)
def test_the_shift_moves_all_token_keys_together(originals: list[Trajectory]) -> None:
    shifted = shift_to_predictions(PackedBatch.from_trajectories(originals)).to_trajectories()
    for before, after in zip(originals, shifted, strict=True):
        assert np.array_equal(after.tokens["input_ids"], before.tokens["input_ids"])
        assert np.array_equal(after.tokens["targets"][:-1], before.tokens["input_ids"][1:])
        for key in ("loss_mask", "logprobs", "versions", "turn_ids", "image_features"):
            assert np.array_equal(after.tokens[key][:-1], before.tokens[key][1:]), key
        assert not after.tokens["loss_mask"][-1]
        assert after.tokens["versions"][-1] == -1


def test_keys_that_differ_are_named() -> None:
    odd = trajectory(3, 1, 1)
    odd.tokens["values"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"row 1 .*'values'"):
        PackedBatch.from_trajectories([trajectory(3, 2, 1), odd])


def test_mismatched_lengths_are_refused() -> None:
    good = trajectory(3, 1, 1)
    with pytest.raises(ValueError, match=r"differ in length.*'logprobs': 2"):
        Trajectory({**good.tokens, "logprobs": torch.zeros(2)})
    with pytest.raises(ValueError, match="add up to 4"):
        Ragged(torch.tensor([1, 3]), {"x": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"dtype int32"):
        Trajectory({**good.tokens, "input_ids": torch.zeros(3, dtype=torch.int32)})


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"rewards.*input_ids"):
        PackedBatch.from_trajectories([trajectory(2, 1, 1)])["rewards"]


# Units: two or three sequences that belong together and stand apart.


def in_units(index: list[int]) -> PackedBatch:
    """Sequences with their number as reward, in these units; a unit's margin is 100 times its number."""
    batch = PackedBatch.from_trajectories([trajectory(2 + row % 3, row, 1) for row in range(len(index))])
    return batch.with_units(torch.tensor(index), margin=100.0 * torch.arange(max(index) + 1))


def members(batch: PackedBatch) -> dict[float, list[float]]:
    """The rewards of each unit's sequences, in order, by its margin."""
    margins, rewards = batch["margin"].tolist(), batch["reward"].tolist()
    return {margin: [rewards[row] for row in rows] for margin, rows in zip(margins, batch.unit_rows, strict=True)}


def test_a_unit_knows_its_sequences() -> None:
    batch = in_units([0, 1, 0, 2, 1, 0])
    assert batch.unit_rows == [[0, 2, 5], [1, 4], [3]]
    assert batch.unit_count == 3
    assert batch["margin"].tolist() == [0, 100, 200]
    plain = batch.with_units(None)
    assert plain.unit_rows == [[0], [1], [2], [3], [4], [5]]
    assert plain.unit_count == 6
    assert plain.get("margin") is None


def test_selected_units_bring_their_values() -> None:
    """In whatever order; a unit that is not among them leaves with its values."""
    batch = in_units([0, 1, 0, 2, 1, 0])
    assert members(batch.select([4, 3, 1])) == {100: [4, 1], 200: [3]}
    assert members(batch.select([5, 0, 2])) == {0: [5, 0, 2]}
    assert members(batch.select([3])) == {200: [3]}
    assert members(batch.select([1])) == {100: [1]}, "half a unit is what it is"
    assert batch.select([4, 3, 1]).unit_index.tolist() == [0, 1, 0]


def test_a_selection_of_nothing_has_no_units() -> None:
    empty = in_units([0, 1, 0]).select([])
    assert (len(empty), empty.unit_count, empty.unit_rows) == (0, 0, [])
    assert empty["margin"].shape == (0,)


def test_units_of_several_batches_stay_apart() -> None:
    one, two = in_units([0, 1, 0]), in_units([1, 0])
    both = PackedBatch.concatenate([one, two])
    assert both.unit_rows == [[0, 2], [1], [4], [3]]
    assert both["margin"].tolist() == [0, 100, 0, 100]
    again = PackedBatch.concatenate([both.select([0, 1, 2]), both.select([]), both.select([3, 4])])
    assert again.unit_rows == both.unit_rows
    mixed = PackedBatch.concatenate([one.with_units(None), one.with_units(torch.tensor([0, 0, 0]))])
    assert mixed.unit_rows == [[0], [1], [2], [3, 4, 5]]


def test_units_survive_bytes_and_devices() -> None:
    batch = in_units([0, 1, 0, 2, 1, 0])
    for same in (PackedBatch.from_bytes(batch.to_bytes()), batch.to("cpu"), batch.with_sequences(x=torch.zeros(6))):
        assert members(same) == members(batch)
        assert torch.equal(same.unit_index, batch.unit_index)
    assert PackedBatch.from_bytes(batch.with_units(None).to_bytes()).unit_index is None


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.randoms())
def test_any_selection_keeps_who_belongs_together(drawn: list[int], random: object) -> None:
    index = [sorted(set(drawn)).index(unit) for unit in drawn]
    batch = in_units(index)
    rows = list(range(len(index)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    rows = rows[: random.randint(1, len(rows))]  # type: ignore[attr-defined]
    wanted: dict[float, list[float]] = {}
    for row in rows:
        wanted.setdefault(100.0 * index[row], []).append(float(row))
    assert members(batch.select(rows)) == wanted


def test_units_that_do_not_fit_are_refused() -> None:
    batch = in_units([0, 1, 0])
    with pytest.raises(ValueError, match="key 'margin' has 3 values for 2 units"):
        batch.with_units(torch.tensor([0, 1, 0]), margin=torch.zeros(3))
    with pytest.raises(ValueError, match="units are given for 2 of 3 sequences"):
        batch.with_units(torch.tensor([0, 1]))
