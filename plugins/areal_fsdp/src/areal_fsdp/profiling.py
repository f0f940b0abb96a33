"""Measurements of an engine: its meter, and traces for https://ui.perfetto.dev."""

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
def profiled(settings: ProfileSettings | None, update: int, name: str) -> Iterator[None]:
    """Profile the code inside this context, if the settings name this update.

    A trace that cannot be written is reported on stderr and raises no error.

    Args:
        settings: updates to profile, and the folder of their traces; None for none.
        update: number of the update in this process, from 1; skipped updates count.
        name: role and rank, the beginning of the file's name.
    """
    if settings is None or update not in settings.updates:
        yield
        return
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        yield
        if on_gpu:
            torch.cuda.synchronize()
    # The process id, because a resumed run counts updates from 1 again.
    path = settings.folder / f"{name}-update{update}-{os.getpid()}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        result = f"is in {path}"
    except (OSError, RuntimeError) as error:
        result = f"cannot be written to {path}: {error}"
    sys.stderr.write(f"the trace of update {update} {result}\n")


def meter_of(
    model: Decoder | None,
    device: torch.device,
    dtype: torch.dtype,
    adapter: Mapping[str, torch.Tensor] | None = None,
) -> Meter:
    """Return the meter of an engine.

    Args:
        model: the model's sizes, None for unknown layers.
        device: device of the computation.
        dtype: dtype of the computation.
        adapter: parameters of an adapter, None without one.
    """
    learning = None if adapter is None else sum(value.numel() for value in adapter.values())
    ranks = rank_and_ranks()[1]
    if device.type != "cuda":
        return Meter(model, ranks, learning=learning)
    gpu = torch.cuda.get_device_properties(device)
    peak = peak_flops(gpu.name) if dtype == torch.bfloat16 else None
    return Meter(model, ranks, peak, gpu.total_memory, learning)
