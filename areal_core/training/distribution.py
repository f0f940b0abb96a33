"""What rank 0 knows, on all ranks of the trainer."""

from __future__ import annotations

import hashlib
import socket
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_core.errors import RunError
from areal_core.messages import FrameDecoder, encode_frame
from areal_core.messages.rollouts import Beginning
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = timedelta(days=365)
"""Rank 0 may wait for rollouts or an evaluation for as long as it likes. That it lives the driver knows, and ends
all ranks where it does not: a clock in a collective would end runs that are merely slow."""


@cache
def _patient(_: object) -> dist.ProcessGroup:
    """The group in which ranks wait for rank 0; one for each group of all ranks."""
    return _new_group()


def _new_group() -> dist.ProcessGroup:
    return cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=PATIENCE))


def open_store(host: str, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A store through which others meet, on a free port of one address; PyTorch by itself would listen on all.

    Raises:
        RunError: the address is none of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise RunError(f"cannot listen on {host}, where others shall meet: {error}") from None
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def agree(value: float) -> float:
    """Rank 0's value on every rank."""
    shared = torch.tensor([value], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.broadcast(shared, 0, group=_patient(dist.group.WORLD))
    return float(shared)


def gather(value: float) -> list[float]:
    """All ranks' values in the order of the ranks, on every rank."""
    own = torch.tensor([value], dtype=torch.float64)
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if len(values) == 1:
        return [value]
    dist.all_gather(values, own, group=_patient(dist.group.WORLD))
    return [float(each) for each in values]


def gather_texts(text: str) -> list[str]:
    """All ranks' texts in the order of the ranks, on every rank."""
    found = [text] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, text, group=_patient(dist.group.WORLD))
    return found


def gather_objects(own: object) -> list[Any] | None:
    """All ranks' objects in the order of the ranks, on rank 0; None on the others."""
    if dist.get_world_size() == 1:
        return [own]
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, found, group=_patient(dist.group.WORLD))
    return found


def host_number() -> float:
    """A number for this rank's host, equal to that of the other ranks there, and exact in 64 bits."""
    digest = hashlib.sha256(socket.gethostname().encode()).digest()
    return float(int.from_bytes(digest[:6], "big"))


def own_barrier() -> Callable[[], None]:
    """A `wait_for_all` for one thread of each rank, that nothing which the other threads do disturbs; collective."""
    return partial(dist.barrier, group=_new_group()) if dist.get_world_size() > 1 else lambda: None


def wait_for_all() -> None:
    """Return when every rank has come here."""
    if dist.get_world_size() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


def share_beginning(beginning: Beginning | None) -> Beginning:
    """What rank 0 was told of where the run begins, on every rank; None on the others."""
    told = share_bytes(bytes(encode_frame(beginning or Beginning(0, None, 0))))
    known: Beginning = FrameDecoder().feed(told)[0].message
    return known


def share_text(text: str) -> str:
    """Rank 0's text on every rank."""
    return share_bytes(text.encode()).decode()


def share_or_stop(told: bytes | None) -> bytes:
    """Rank 0's bytes on every rank.

    Args:
        told: on rank 0, None where the run shall stop; ignored on other ranks.

    Raises:
        Interrupted: on every rank, where rank 0 has been asked to stop.
    """
    if agree(float(dist.get_rank() == 0 and told is None)):
        raise Interrupted
    return share_bytes(told or b"")


def share_bytes(data: bytes) -> bytes:
    """Rank 0's bytes on every rank."""
    size = int(agree(len(data)))
    if dist.get_world_size() == 1 or not size:
        return data if size else b""
    buffer = torch.empty(size, dtype=torch.uint8)
    if dist.get_rank() == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, 0, group=_patient(dist.group.WORLD))
    return buffer.numpy().tobytes()
