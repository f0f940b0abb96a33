"""Short causal convolutions that do not cross sequences in a packed batch.

transformers' mixers call `causal_conv1d_fn` of their own module. Only the implementation in the package causal-conv1d
reads `seq_idx`, and this package must be compiled on each machine. This module does the same in PyTorch, as a sum over
the taps, which the compiler fuses into one kernel. With it, LFM2 can be packed, and with flash-linear-attention also
Qwen3.5 and Qwen3-Next.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

_FUNCTION = "causal_conv1d_fn"


def divide_convolutions(model: PreTrainedModel) -> None:
    """Make the convolutions of a model's mixers read `seq_idx`, unless the package causal-conv1d is installed.

    This replaces the function in transformers' module. Calls without `seq_idx` use the original function.
    """
    if find_spec("causal_conv1d") is not None:
        return
    for source in {sys.modules[type(module).__module__] for module in model.modules()}:
        original = getattr(source, _FUNCTION, None)
        if original is not None and original.__module__ != __name__:
            setattr(source, _FUNCTION, _by_sequence(original))


def _by_sequence(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        seq_idx: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if seq_idx is None:
            return original(hidden_states, weight, bias, activation=activation, **others)
        mixed = packed_convolution(hidden_states, weight, bias, seq_idx)
        return mixed if activation is None else ACT2FN[activation](mixed)

    return convolve


def packed_convolution(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seq_idx: torch.Tensor
) -> torch.Tensor:
    """Convolve each channel with its own taps, within each sequence; sums are float32.

    Args:
        hidden: [B, channels, T].
        weight: [channels, taps]; the last tap is the token's own.
        bias: [channels] or None.
        seq_idx: [B, T], the index of each token's sequence.

    Returns:
        [B, channels, T], in the dtype of `hidden`.
    """
    total, taps = hidden.shape[-1], weight.shape[-1]
    mixed = hidden.float() * weight[:, -1:].float()
    for back in range(1, taps):
        earlier = F.pad(hidden, (back, 0))[..., :total]
        same = F.pad(seq_idx, (back, 0), value=-1)[..., :total] == seq_idx
        mixed = mixed + torch.where(same[:, None], earlier, 0).float() * weight[:, taps - 1 - back, None].float()
    if bias is not None:
        mixed = mixed + bias[:, None].float()
    return mixed.to(hidden.dtype)
