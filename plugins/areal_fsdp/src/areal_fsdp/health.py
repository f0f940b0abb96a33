"""Health checks of this plugin, for `areal doctor`."""

from __future__ import annotations

import torch

from areal_core.plugins import Finding
from areal_fsdp.attention.kernels import choose_kernel


def check_attention() -> Finding:
    """Return the fastest attention kernel that works, for the heads of a typical model."""
    if not torch.cuda.is_available():
        return Finding(True, "PyTorch's own, on the CPU")
    return Finding(True, choose_kernel("auto", 14, 2, 64, torch.device("cuda")))


def check_nccl() -> Finding:
    """Return the version of NCCL; it is not needed without a GPU."""
    if not torch.cuda.is_available():
        return Finding(True, "not needed without a GPU: gloo is used")
    if not torch.distributed.is_nccl_available():
        return Finding(False, "this PyTorch was built without NCCL: ranks on GPUs cannot communicate")
    return Finding(True, ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
