"""RMS normalization with fewer passes over memory than the models' own.

Hugging Face models write it as six operations, each with its own gradient. On one CPU core, 3,328 tokens, forward and
backward take 1.2 ms instead of 2.0 for [T, 96], and 2.0 ms instead of 4.4 for [T, 4 heads, 32]; PyTorch's `rms_norm`
takes 2.5 and 2.9. Together this is a tenth of the demonstration's train step. On a GPU `rms_norm` is a single kernel.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

_TOLERANCE = 1e-5


def speed_up_norms(model: torch.nn.Module, *, except_in: torch.nn.Module | None = None) -> int:
    """Replace the `forward` of each plain RMS norm; the module, its name and its parameter stay.

    A norm is plain if its class is called `...RMSNorm`, it has a weight vector and `variance_epsilon`, and its result
    on a probe equals the replacement's. Norms that add 1 to the weight are not plain.

    Args:
        model: on the CPU or the meta device, before sharding.
        except_in: a part of the model whose norms are not replaced.

    Returns:
        The number of replaced norms.
    """
    replaced = 0
    kept = set(except_in.modules()) if except_in is not None else set()
    for module in model.modules():
        if module not in kept and type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            module.forward = partial(_forward, module, module.forward)
            replaced += 1
    return replaced


@torch.no_grad()
def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1 or not hasattr(module, "variance_epsilon"):
        return False
    probe = torch.linspace(-2, 3, 3 * len(weight), dtype=torch.float32).view(1, 3, -1)
    if weight.is_meta:  # the comparison works with any weight
        weight = torch.linspace(-1, 2, len(weight), dtype=weight.dtype)
    expected = torch.func.functional_call(module, {"weight": weight}, probe).float()
    replacement = _FusedNorm.forward(None, probe, weight.float(), module.variance_epsilon)
    return bool((replacement - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _forward(module: Any, original: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if hidden.dtype != weight.dtype:
        return original(hidden)
    if hidden.is_cuda:
        return F.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)
    if hidden.dtype != torch.float32:
        return original(hidden)
    normed: torch.Tensor = _FusedNorm.apply(hidden, weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


class _FusedNorm(torch.autograd.Function):
    """y = w x r with r = 1 / sqrt(mean(x²) + epsilon); dx = r (w g - x r mean(w g x r)), dw = sum(g x r)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        scale = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_()
        scale = scale.div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        if ctx is not None:
            ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden * scale
        product = gradient * normed
        of_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).unsqueeze_(-1).div_(-hidden.shape[-1])
        return (gradient * weight).addcmul_(normed, mean).mul_(scale), of_weight, None
