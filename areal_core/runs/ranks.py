"""One process as a rank of a trainer: seeds, threads, and the process group of all ranks.

Example:
    A program of several ranks, which a `ProcessGroup` starts, has this function for `areal_core.processes.run_role`:

    >>> from areal_core.programs import trainer_rank
    >>> def play(member, config):
    ...     with trainer_rank(member, config):
    ...         engine = config.train_engine.build()
    ...         ...  # engine.setup(...), engine.train(...)
    ...     return 0
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]

from areal_core.runtime.environment import SCRATCH_VARIABLE
from areal_core.runtime.network import is_loopback
from areal_core.training.collectives import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.config import RunConfig
    from areal_core.config.sections import TrainingSection
    from areal_core.runtime.member import Member


@contextmanager
def trainer_rank(member: Member, config: RunConfig) -> Iterator[None]:
    """Be a rank of the trainer in this context: seed torch, set its threads, and join the group of all ranks.

    The process of `areal tinker serve` uses it: `areal_tinker.service`.

    Args:
        member: this process, of a group with the variables RANK and WORLD_SIZE.
        config: the config of the run, with its seed and timeouts.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # torch may have been imported before the variable was set
    _seed(config)
    _join_ranks(member, config.training)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def only_rank(config: RunConfig) -> Iterator[None]:
    """Be the only rank of a trainer in this context. Restore the settings of torch afterwards."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    _seed(config)
    dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(mode=was_deterministic)


def _seed(config: RunConfig) -> None:
    torch.manual_seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(mode=True)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _join_ranks(member: Member, section: TrainingSection) -> None:
    """Form the group of all ranks.

    On one machine the ranks meet in a file of this user. On several they meet at a port of rank 0, whose store accepts
    keys from everybody who can reach it.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = None
    if rank == 0 and is_loopback(member.host):
        member.announce("rendezvous", f"{Path(os.environ[SCRATCH_VARIABLE]) / 'rendezvous'}:")
    elif rank == 0:
        store = open_store(member.host)
        member.announce("rendezvous", f"{member.host}:{store.port}")
    place, _, port = member.lookup("rendezvous", section.phase_timeout_s).rpartition(":")
    if store is None:
        store = TCPStore(place, int(port), ranks, is_master=False) if port else FileStore(place, ranks)
    timeout = timedelta(seconds=section.collective_timeout_s)
    dist.init_process_group(_backend(), store=store, rank=rank, world_size=ranks, timeout=timeout)
