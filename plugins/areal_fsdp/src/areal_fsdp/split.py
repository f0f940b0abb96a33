"""Who computes what: the split of a batch over ranks and micro-batches, and the sums over ranks."""

from __future__ import annotations

import atexit
from dataclasses import dataclass

import torch
import torch.distributed as dist

from areal_core.data import split_by_tokens, split_into_microbatches
from areal_core.errors import RunError


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a batch.

    Attributes:
        microbatches: rows of the batch, for each micro-batch; fewer than `rounds` where other ranks have more.
        rounds: micro-batches that every rank runs; this rank fills up with `dummy`, because collectives of sharded
            parameters need every rank.
        dummy: rows of a micro-batch that does not count: the shortest sequence.
    """

    microbatches: list[list[int]]
    rounds: int
    dummy: list[int]

    @classmethod
    def plan(
        cls, lengths: list[int], units: list[list[int]], *, rank: int, ranks: int, max_tokens: int, longest: int | None
    ) -> Split:
        """Plan a batch of at least one sequence; every rank plans for all, so nothing has to be sent.

        Args:
            lengths: tokens of each sequence.
            units: the sequences of each unit, which stay together.
            rank: this one.
            ranks: how many.
            max_tokens: budget of a micro-batch; a unit that is over it is one by itself.
            longest: positions that the model has, None if it does not say.

        Raises:
            RunError: a sequence is longer than the model's positions.
        """
        if longest is not None and max(lengths) > longest:
            raise RunError(
                f"a sequence of {max(lengths)} tokens is beyond the model's max_position_embeddings of {longest}",
                hints=["lower sampling.max_new_tokens, shorten the prompts, or choose a model with a longer context"],
            )
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        shares = split_by_tokens(sizes, ranks)
        cuts = [split_into_microbatches([sizes[unit] for unit in share], max_tokens) for share in shares]
        own = [sorted(row for unit in part for row in units[shares[rank][unit]]) for part in cuts[rank]]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        return cls(own, max(len(cut) for cut in cuts), [shortest])


def join_group_of_one(device: torch.device) -> None:
    """Initialise `torch.distributed` with this process alone, where nobody has; shards and checkpoints need a group."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def fail_together(error: Exception | None, what: str) -> None:
    """Raise on every rank when one failed, so that no rank waits for another that is gone; collective.

    Raises:
        RunError: on the failed rank with its error, on the others with a pointer to it.
    """
    failed = torch.tensor([error is not None], dtype=torch.uint8)
    if rank_and_ranks()[1] > 1:
        dist.all_reduce(failed, dist.ReduceOp.MAX)
    if error is not None:
        raise RunError(f"{what} failed: {error}") from error
    if failed.item():
        raise RunError(f"{what} failed on another rank; its own message says why")
