"""What `areal doctor` asks of this plugin."""

from __future__ import annotations

import torch

from areal_core.plugins import Finding
from areal_fsdp.attention.kernels import choose_kernel


def check_attention() -> Finding:
    """The fastest kernel that computes attention, tried with the heads of a model of 0.5 to 7 billion parameters."""
    if not torch.cuda.is_available():
        return Finding(True, "PyTorch's own, on the CPU")
    return Finding(True, choose_kernel("auto", 14, 2, 64, torch.device("cuda")))


def check_nccl() -> Finding:
    """Its version, where there is a GPU."""
    if not torch.cuda.is_available():
        return Finding(True, "not needed without a GPU: gloo is used")
    if not torch.distributed.is_nccl_available():
        return Finding(False, "this PyTorch was built without it: ranks on GPUs cannot work together")
    return Finding(True, ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
