"""Data and reward of `gpu_faults.py`, in a module that uses CUDA as it is imported, and notes what it saw there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_place = json.loads(os.environ.get("AREAL_PLACES", '[[0, "the program itself", "", []]]'))[0]
_fact = {"member": _place[1], "gpus": _place[3], "shown": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}
_fact["forked"] = b"fork_server" in Path("/proc/self/cmdline").read_bytes()
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    _fact |= {"seen": torch.cuda.device_count(), "uuid": str(torch.cuda.get_device_properties(0).uuid)}
with Path(os.environ.get("GPU_FAULTS_NOTES", os.devnull)).open("a") as _file:
    _file.write(json.dumps(_fact) + "\n")


class Sentences:
    """Rows that fine-tuning learns and GRPO asks."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Mapping[str, str]:
        return {"prompt": f"w{index + 12} w13 ", "completion": "w14 w15"}


def lower_half(completion_ids: Sequence[int]) -> float:
    """See `gpu_parts.py`."""
    return sum(token < 75968 for token in completion_ids) / max(1, len(completion_ids))
