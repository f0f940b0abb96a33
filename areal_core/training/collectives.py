"""Collective operations of the trainer's ranks: `torch.distributed` under its own names, for bytes, texts and numbers.

Rank 0 is the *main* rank: it talks to the rollout controller, writes shared files and reports. All ranks must call the
functions here in the same order, except for `is_main` and `open_store`. With one rank, a function returns immediately.
Nothing is pickled.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

NO_TIMEOUT = timedelta(days=365)
"""Ranks wait for the main rank as long as it waits for rollouts or for an evaluation. The driver detects a dead rank
and kills the others; a timeout of the collective would end runs that are merely slow."""


@cache
def _patient(_: object) -> dist.ProcessGroup:
    """Return the group without a timeout that belongs to the group of all ranks, which is the argument."""
    return _new_group()


def _new_group() -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=NO_TIMEOUT))


def is_main() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def broadcast(value: float) -> float:
    """Return the main rank's value."""
    shared = torch.tensor([value], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.broadcast(shared, 0, group=_patient(dist.group.WORLD))
    return float(shared)


def broadcast_bytes(payload: bytes) -> bytes:
    """Return the main rank's bytes. Collective; the first call makes a group without a timeout.

    Example:
        >>> from areal_core.engines import broadcast_bytes
        >>> def receive(command=b""):  # rank 0 has a command, the others wait for it
        ...     return broadcast_bytes(command)
    """
    size = int(broadcast(len(payload)))
    if dist.get_world_size() == 1 or not size:
        return payload if size else b""
    buffer = _as_tensor(payload, size) if is_main() else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=_patient(dist.group.WORLD))
    return buffer.numpy().tobytes()


def broadcast_text(text: str) -> str:
    """Return the main rank's text."""
    return broadcast_bytes(text.encode()).decode()


def all_gather(value: float) -> list[float]:
    """Return every rank's value, in the order of the ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if len(values) == 1:
        return [value]
    dist.all_gather(values, own, group=_patient(dist.group.WORLD))
    return [float(gathered) for gathered in values]


def all_gather_text(text: str) -> list[str]:
    """Return every rank's text, in the order of the ranks."""
    payload = text.encode()
    sizes = [int(size) for size in all_gather(len(payload))]
    if len(sizes) == 1:
        return [text]
    padded = _as_tensor(payload, max(sizes))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=_patient(dist.group.WORLD))
    return [part[:size].numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)]


def gather_bytes(payload: bytes) -> list[bytes]:
    """Return every rank's bytes on the main rank, in the order of the ranks; an empty list on the others."""
    sizes = [int(size) for size in all_gather(len(payload))]
    if len(sizes) == 1:
        return [payload]
    padded = _as_tensor(payload, max(sizes))
    parts = [torch.empty_like(padded) for _ in sizes] if is_main() else None
    dist.gather(padded, parts, 0, group=_patient(dist.group.WORLD))
    return [part[:size].numpy().tobytes() for part, size in zip(parts or (), sizes, strict=False)]


def barrier() -> None:
    """Return when every rank has called this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


def new_barrier() -> Callable[[], None]:
    """Return a `barrier` for one thread of each rank. Collectives of other threads do not disturb it."""
    return partial(dist.barrier, group=_new_group()) if dist.get_world_size() > 1 else lambda: None


def open_store(host: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Listen on a free port of one address, as the store through which ranks or servers meet.

    PyTorch's own server would listen on all addresses of the machine.

    Raises:
        RunError: this machine does not have the address.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise RunError(f"cannot listen on {host} for the processes that shall meet there: {error}") from None
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _as_tensor(payload: bytes, size: int) -> torch.Tensor:
    """Return bytes as a tensor of `size` bytes, filled with zeros."""
    padded = torch.zeros(size, dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return padded
