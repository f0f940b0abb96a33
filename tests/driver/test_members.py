"""What members of a group are told of where they stand."""

from __future__ import annotations

import pytest

from areal_core.driver.members import _environment
from areal_core.interfaces.launcher import Place, ProcessGroup


@pytest.mark.parametrize(
    ("places", "local"),
    [
        ({0: Place("a", (0,)), 1: Place("a", (1,)), 2: Place("b", (0,))}, ["0", "0", "0"]),  # each sees its own alone
        ({0: Place("a"), 1: Place("a"), 2: Place("b")}, ["0", "1", "0"]),
    ],
)
def test_a_local_rank_is_the_number_of_a_gpu_that_the_rank_sees(places: dict[int, Place], local: list[str]) -> None:
    group = ProcessGroup("trainer", "trainer", ["-"], count=3)
    told = [_environment(group, index, places, several=True) for index in places]
    assert [one["LOCAL_RANK"] for one in told] == local
    assert [one["RANK"] for one in told] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in told} == {"3"}
