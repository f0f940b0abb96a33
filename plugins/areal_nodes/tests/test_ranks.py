"""The rank of a process, as schedulers write it into the environment."""

from __future__ import annotations

import os

import pytest

from areal_core.errors import UsageError
from areal_nodes import ranks as ranks_module
from areal_nodes.ranks import Rank, take_rank


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*ranks_module._NAMES, "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}, Rank(5, 1, 3)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, Rank(3, 1, 3)),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head"}, Rank(1, 0, 4)),
        ({"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_PROCID": "1"}, Rank(7, 3, 2)),
        ({"PMI_RANK": "2", "MPI_LOCALRANKID": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, Rank(2, 0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}, Rank(3, 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"},
         Rank(3, 1, 2)),
        ({"SLURM_PROCID": "0", "RANK": "1", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "1"}, Rank(1, 1, 1)),
        ({"JOB_COMPLETION_INDEX": "2"}, Rank(2, 0, None)),
    ],
)  # fmt: skip
def test_the_rank_is_the_one_of_the_innermost_scheduler(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: Rank | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert take_rank() == rank
    left = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "JOB_COMPLETION_INDEX"}
    assert environment.keys() & os.environ.keys() <= left, (
        "processes of the run would take these variables for their own"
    )
    assert ("TORCHELASTIC_USE_AGENT_STORE" in os.environ) is (rank is None)


def test_a_rank_that_is_not_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("first", "-1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UsageError, match=f"RANK is '{rank}', but must be a whole number"):
            take_rank()
