"""A launcher writes the places of members into their environment, and each member reads its own."""

from __future__ import annotations

import pytest

from areal_core.interfaces.launcher import Place, ProcessGroup
from areal_core.runtime.environment import MemberPlace, member_environment, member_place

GROUP = ProcessGroup("server", "server", ["-"], count=8)
PLACES = {4: Place("a", (0, 1)), 6: Place("b", (2,))}


def test_a_member_alone_reads_its_place_whatever_task_it_is_in() -> None:
    environment = member_environment(GROUP, {6: PLACES[6]}) | {"SLURM_PROCID": "3"}
    assert member_place(environment) == MemberPlace("server", 6, "server-6", "b", [2])


@pytest.mark.parametrize(
    ("variables", "index"),
    [({}, 4), ({"SLURM_PROCID": "0"}, 4), ({"SLURM_PROCID": "1"}, 6), ({"AREAL_TASK": "1", "SLURM_PROCID": "0"}, 6)],
)
def test_each_task_of_one_command_reads_the_place_of_its_number(variables: dict[str, str], index: int) -> None:
    place = member_place(member_environment(GROUP, PLACES) | variables)
    assert (place.index, place.name) == (index, f"server-{index}")
    assert (place.node, tuple(place.gpus)) == PLACES[index]
