"""Where the ranks of a trainer meet: in a file on one machine, at a port of rank 0 elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from areal_core.config.sections import TrainingSection
from areal_core.runs.ranks import _join_ranks
from areal_core.runtime.environment import SCRATCH_VARIABLE
from areal_core.training import collectives
from tests.needs_ipv6 import NEEDS_IPV6

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("host", "opens_a_port"), [("127.0.0.1", False), pytest.param("::1", False, marks=NEEDS_IPV6), ("0.0.0.0", True)]
)
def test_ranks_of_one_machine_open_no_port_to_meet(
    host: str, opens_a_port: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: dict[str, str] = {}
    opened: list[str] = []

    def open_store(host: str) -> Any:
        opened.append(host)
        return collectives.open_store(host)

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", SCRATCH_VARIABLE: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("areal_core.runs.ranks.open_store", open_store)
    member: Any = SimpleNamespace(host=host, announce=announced.__setitem__, lookup=lambda name, _: announced[name])
    _join_ranks(member, TrainingSection())
    try:
        dist.barrier()
        assert bool(opened) == opens_a_port
        assert (tmp_path / "rendezvous").is_file() != opens_a_port
    finally:
        dist.destroy_process_group()
