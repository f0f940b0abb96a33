"""Variable-length attention kernels for half precision on a GPU, and the choice between them.

A kernel is a pair of functions over packed tensors: `query` [T, heads, head size], `key` and `value` [T, key heads,
head size], `bounds` [B + 1] int32 on the device. Kernels support grouped-query attention without copies of key heads.
Forward returns the output and the logarithm of the softmax's denominator, float32 [heads, T]; backward takes both.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError
from areal_fsdp.attention.packed import PackedLayout, Reach, Three, packed_attention

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_PROBE_LENGTHS = (130, 1, 67)
_PROBE_TOLERANCE = 0.03
"""Largest relative error, in the L2 norm, of a kernel's output and gradients; bfloat16 rounding causes about 0.005."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Forward and backward functions of one library.

    Attributes:
        name: the value of the setting `attention_kernel`.
        forward: (query, key, value, bounds, reach) to (output, log of the denominator).
        backward: (gradient, query, key, value, output, log of the denominator, bounds, reach) to three gradients.
        has_windows: True if it supports sliding windows. Otherwise PyTorch's kernel computes these.
    """

    name: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., Three]
    has_windows: bool = True


def _torch_kernel() -> Kernel:
    """Return PyTorch's own kernel (FlashAttention 2), which is always available."""

    def sides(reach: Reach) -> dict[str, int | None]:
        return {"window_size_left": reach.window - 1 if reach.window else None, "window_size_right": 0}

    def forward(q: Any, k: Any, v: Any, bounds: Any, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        packed = (bounds, bounds, reach.longest, reach.longest, 0.0, True)
        window = sides(reach) if reach.window else {}
        results = torch.ops.aten._flash_attention_forward(q, k, v, *packed, False, scale=reach.scale, **window)
        return results[0], results[1]

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, reach: Reach) -> Three:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, unused
        unused = torch.empty(0, device=q.device)
        packed = (bounds, bounds, reach.longest, reach.longest, 0.0, True, state, unused)
        window = sides(reach) if reach.window else {}
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *packed, scale=reach.scale, **window)

    return Kernel("torch", forward, backward)


def _flash4_kernel() -> Kernel:
    """Return FlashAttention 4 (package flash-attn-4), which compiles for Hopper and Blackwell at its first call."""
    library: Any = importlib.import_module("flash_attn.cute.interface")

    def options(bounds: torch.Tensor, reach: Reach) -> dict[str, Any]:
        return {
            "softmax_scale": reach.scale,
            "causal": not reach.window,
            "window_size_left": reach.window - 1 if reach.window else None,
            "window_size_right": 0 if reach.window else None,
            "cu_seqlens_q": bounds,
            "cu_seqlens_k": bounds,
            "max_seqlen_q": reach.longest,
            "max_seqlen_k": reach.longest,
        }

    def forward(q: Any, k: Any, v: Any, bounds: Any, reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
        results = library._flash_attn_fwd(q, k, v, **options(bounds, reach), return_lse=True)
        return results[0], results[1]

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bounds: Any, reach: Reach) -> Three:
        results = library._flash_attn_bwd(q, k, v, out, grad, lse, **options(bounds, reach))
        return results[0], results[1], results[2]

    return Kernel("flash4", forward, backward)


def _cudnn_kernel() -> Kernel:
    """Return cuDNN's kernel, through its Python front end (package nvidia-cudnn-frontend)."""
    from areal_fsdp.attention.cudnn import backward, forward

    return Kernel("cudnn", forward, backward, has_windows=False)


_MAKERS = {"flash4": _flash4_kernel, "cudnn": _cudnn_kernel, "torch": _torch_kernel}
"""Fastest first."""


@cache
def _kernel(name: str) -> Kernel:
    return _MAKERS[name]()


def kernel_for(name: str, reach: Reach) -> Kernel:
    """Return a kernel by its name, or PyTorch's kernel if that one does not support the window."""
    kernel = _kernel(name)
    return kernel if kernel.has_windows or not reach.window else _kernel("torch")


def choose_kernel(wanted: str, heads: int, key_heads: int, head_size: int, device: torch.device) -> str:
    """Return the fastest kernel that computes attention correctly on this device with these heads.

    Args:
        wanted: `auto`, or the name of a kernel.
        heads: the model's query heads.
        key_heads: the model's key heads.
        head_size: the model's head size.
        device: a GPU.

    Returns:
        The kernel's name, for `kernel_for`.

    Raises:
        RunError: the named kernel is not installed, fails, or computes wrong results.
    """
    for name in _MAKERS if wanted == "auto" else [wanted]:
        try:
            distance = _distance(_kernel(name), heads, key_heads, head_size, device)
        except Exception as error:  # noqa: BLE001 - the libraries' compilers raise many types of errors
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            level = logging.DEBUG if isinstance(error, ImportError) else logging.WARNING
            log.log(level, "attention kernel %s failed: %s", name, reason)
        else:
            if distance <= _PROBE_TOLERANCE:
                log.info("attention kernel: %s (relative error %.4f)", name, distance)
                return name
            reason = f"its results have a relative error of {distance:.2g}"
            log.warning("attention kernel %s is not used: %s", name, reason)
    if wanted in ("auto", "torch"):  # PyTorch's fails only for heads that no kernel supports; then the probe raises
        return "torch"
    raise RunError(
        f"train_engine.attention_kernel: {wanted} cannot be used here: {reason}",
        hints=["set it to auto for the fastest kernel that works, or to torch, which is always available"],
    )


def _distance(kernel: Kernel, heads: int, key_heads: int, head_size: int, device: torch.device) -> float:
    """Return the largest relative error of output and gradients on a few random tokens, compared with float32."""
    generator = torch.Generator(device).manual_seed(0)
    layout = PackedLayout.from_lengths(_PROBE_LENGTHS, device)
    count = sum(_PROBE_LENGTHS)
    shapes = [(count, n, head_size) for n in (heads, key_heads, key_heads, heads)]
    *inputs, grad = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)
    reach = Reach(layout.longest, head_size**-0.5, 0)
    with torch.no_grad():
        out, lse = kernel.forward(*inputs, layout.bounds, reach)
        computed = [out, *kernel.backward(grad, *inputs, out, lse, layout.bounds, reach)]
    leaves = [tensor.float().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        attended = packed_attention(leaves[0], leaves[1], leaves[2], layout)
        expected = [attended.detach(), *torch.autograd.grad(attended, leaves, grad.float())]
    pairs = zip(computed, expected, strict=True)
    return max(float((actual - exact).norm() / exact.norm()) for actual, exact in pairs)
