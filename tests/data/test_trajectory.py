"""Further columns of generations, as they come together in a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from areal_core.data import FinishReason, Generation, Trajectory, TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence


def generation(ids: list[int], column: np.ndarray | None) -> Generation:
    """What was generated, with a column where there is one."""
    columns = {} if column is None else {"choices": column}
    return Generation(ids, [-0.5] * len(ids), [3] * len(ids), FinishReason.STOP, columns)


def column(count: int, value: int) -> np.ndarray:
    """[count, 2, 3], whose first row nothing predicts."""
    made = np.full((count, 2, 3), value, np.uint8)
    made[0] = 0
    return made


def test_a_column_becomes_a_token_key() -> None:
    found = Trajectory.from_generation([1, 2], generation([3, 4, 5], column(5, 7))).tokens["choices"]
    assert np.array_equal(found, column(5, 7))


def test_what_an_earlier_turn_has_told_stays_and_the_rest_is_the_later_one_s() -> None:
    builder = TrajectoryBuilder()
    builder.add_context([1, 2])
    builder.add_generation(generation([3, 4], column(4, 7)))
    builder.add_context([5])
    builder.add_generation(generation([6], column(6, 9)))
    builder.add_context([8, 8])
    found = builder.build().tokens["choices"]
    assert found[:, 0, 0].tolist() == [0, 7, 7, 7, 9, 9, 0, 0]
    assert (found.shape, found.dtype) == ((8, 2, 3), np.uint8)


def test_a_turn_without_a_column_is_told_by_the_next() -> None:
    builder = TrajectoryBuilder()
    builder.add_context([1, 2])
    builder.add_generation(generation([3], None))
    builder.add_generation(generation([4], column(4, 9)))
    builder.add_generation(generation([4], None))
    assert builder.build().tokens["choices"][:, 0, 0].tolist() == [0, 9, 9, 9, 0]


def test_a_column_of_other_tokens_is_refused() -> None:
    builder = TrajectoryBuilder()
    builder.add_context([1, 2, 3])
    with pytest.raises(ValueError, match="'choices' of a generation has 6 values for 5 tokens"):
        builder.add_generation(generation([4, 5], column(6, 7)))


def test_what_a_column_does_not_reach_is_not_known() -> None:
    found = Trajectory.from_generation([1, 2], generation([3, 4, 5], column(3, 7))).tokens["choices"]
    assert found[:, 0, 0].tolist() == [0, 7, 7, 0, 0]


def _generation(ids: list[int], top_ids: Sequence[Sequence[int]]) -> Generation:
    count = len(ids)
    values = [[-1.0 - place for place in range(len(row))] for row in top_ids]
    return Generation(ids, [-1.0] * count, [0] * count, FinishReason.STOP, top_ids=top_ids, top_logprobs=values)


def test_likeliest_tokens_stand_at_the_tokens_of_all_turns() -> None:
    builder = TrajectoryBuilder()
    builder.add_context([1, 2])
    builder.add_generation(_generation([3, 4], [[3, 9], [4, 8]]))
    builder.add_context([5])
    builder.add_generation(_generation([6], [[7, 6]]))
    builder.add_context([5])
    tokens = builder.build().tokens
    assert tokens["top_ids"].dtype == np.int32
    assert tokens["top_logprobs"].dtype == np.float32
    assert tokens["top_ids"].tolist() == [[0, 0], [0, 0], [3, 9], [4, 8], [0, 0], [7, 6], [0, 0]]
    assert tokens["top_logprobs"][[1, 2, 4, 5]].tolist() == [[0, 0], [-1, -2], [0, 0], [-1, -2]]


def test_without_likeliest_tokens_a_trajectory_has_no_such_key() -> None:
    trajectory = Trajectory.from_generation([1], _generation([3], []))
    assert "top_ids" not in trajectory.tokens


@pytest.mark.parametrize("other", [[], [[7, 6, 5]]])
def test_turns_with_other_numbers_of_likeliest_tokens_are_refused(other: list[list[int]]) -> None:
    builder = TrajectoryBuilder()
    builder.add_context([1, 2])
    builder.add_generation(_generation([3, 4], [[3, 9], [4, 8]]))
    builder.add_generation(_generation([6], other))
    with pytest.raises(ValueError, match="request the same number in every turn"):
        builder.build()


@pytest.mark.parametrize("top_ids", [[[3, 9]], [[3], [9], [4]]])
def test_likeliest_tokens_of_other_shapes_are_refused(top_ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"likeliest tokens|top_ids has the shape"):
        _generation([3, 4], top_ids)


def test_log_probabilities_of_a_prompt_are_checked_and_belong_to_no_trajectory() -> None:
    found = Generation([3], [-1.0], [0], FinishReason.STOP, prompt_logprobs=np.array([-0.5, -0.25]))
    assert found.prompt_logprobs == [-0.5, -0.25]
    assert "prompt_logprobs" not in Trajectory.from_generation([1, 2, 5], found).tokens
    assert Generation([3], [-1.0], [0], FinishReason.STOP).prompt_logprobs is None
    with pytest.raises(ValueError, match=r"0\.5 as a log-probability"):
        Generation([3], [-1.0], [0], FinishReason.STOP, prompt_logprobs=[-0.5, 0.5])
