"""SGLang's own server on a CPU without SGLang's kernels: the same options as `python -m sglang.launch_server`.

HTTP server, scheduler, cache of prefixes and weight loader are the real ones; attention and sampling are PyTorch's. The
processes that the server starts import this file again (as `__mp_main__`), so that all of them are prepared alike.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

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
