"""SGLang's own server on a CPU without SGLang's kernels: the same options as `python -m sglang.launch_server`.

HTTP server, scheduler, cache of prefixes and weight loader are the real ones; attention and sampling are PyTorch's. The
processes that the server starts import this file again (as `__mp_main__`), so that all of them are prepared alike.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "shim"))

import torch
import torch._inductor.runtime.triton_compat  # PyTorch must find out that there is no Triton before we pretend it
from absent_kernels import pretend
from torch.utils._triton import has_triton_package

has_triton_package()
pretend()
# The torchvision that package indexes hold is built for CUDA; beside PyTorch for the CPU its operators do not register,
# and without them it cannot be imported.
for name in ("nms", "qnms"):
    with suppress(RuntimeError):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
# Looked up, and never called, while SGLang's processor of images is imported.
for name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{name}", "() -> ()")


def open_file(
    cls: Any, size: Any, stride: Any, start: int, storage: Any, dtype: Any, device: Any, name: bytes, length: int,
    offset: int, *_: Any,
) -> torch.Tensor:  # fmt: skip
    """In place of PyTorch's `rebuild_cuda_tensor`: a file is the memory of a GPU, and its name the handle."""
    memory = torch.UntypedStorage.from_file(name.decode(), shared=False, nbytes=length)
    return torch.empty(0, dtype=dtype).set_(memory, offset // dtype.itemsize + start, size, stride)


import_module("torch.multiprocessing.reductions").rebuild_cuda_tensor = open_file
import_module("sglang.srt.utils.patch_torch")._device_from_maybe_uuid = lambda uuid: 0


# Memory that SGLang keeps beside its caches is page-locked by CUDA, which is not there.
host_memory: Any = import_module("sglang.srt.mem_cache.pool_host.common")
host_memory.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, *, dtype, **_: torch.empty(dims, dtype=dtype)


class Pageable:
    """PyTorch for modules that ask for page-locked memory, and get other memory."""

    def __getattr__(self, name: str) -> Any:
        made = getattr(torch, name)
        if name not in {"empty", "tensor", "zeros"}:
            return made
        return lambda *arguments, pin_memory=False, **options: made(*arguments, **options)  # noqa: PLW0108


if "--enable-lora" in sys.argv:
    for place in ("layers", "backend.torch_backend"):
        module: Any = import_module(f"sglang.srt.lora.{place}")
        module.torch = Pageable()
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign,assignment,misc]


def main() -> None:
    """Serve until ended; nothing that the server started outlives it."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    settings = prepare_server_args(sys.argv[1:])
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
