"""What an engine tells of its work: its meter, and traces, which https://ui.perfetto.dev shows."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from areal_fsdp.parallel.ranks import rank_and_ranks
from areal_fsdp.planning.meter import Meter, peak_flops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_fsdp.config import ProfileSettings
    from areal_fsdp.planning.decoder import Decoder


@contextmanager
def profiled(settings: ProfileSettings | None, update: int, who: str) -> Iterator[None]:
    """Record what runs inside, if this update was asked for; a trace that cannot be written is told and no more.

    Args:
        settings: which updates, and where their traces go; None for none.
        update: its number in this process, from 1; one that is left out, because it is not finite, has one too.
        who: role and rank, for the name of the file.
    """
    if settings is None or update not in settings.updates:
        yield
        return
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    path = settings.folder / f"{who}-update{update}-{os.getpid()}.json.gz"  # a resumed run begins at 1 again
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        message = f"is in {path}"
    except (OSError, RuntimeError) as error:
        message = f"cannot be written to {path}: {error}"
    sys.stderr.write(f"the trace of update {update} {message}\n")


def meter_of(
    model: Decoder | None,
    device: torch.device,
    dtype: torch.dtype,
    adapter: Mapping[str, torch.Tensor] | None = None,
) -> Meter:
    """What counts the work of an engine.

    Args:
        model: its sizes, None where they are not known.
        device: where it computes.
        dtype: in which.
        adapter: what alone learns, None where all parameters do.
    """
    learning = None if adapter is None else sum(value.numel() for value in adapter.values())
    ranks = rank_and_ranks()[1]
    if device.type != "cuda":
        return Meter(model, ranks, learning=learning)
    gpu = torch.cuda.get_device_properties(device)
    peak = peak_flops(gpu.name) if dtype == torch.bfloat16 else None
    return Meter(model, ranks, peak, gpu.total_memory, learning)
