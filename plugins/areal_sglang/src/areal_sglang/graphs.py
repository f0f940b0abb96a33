"""CUDA graphs of prefills that SGLang captures at its start (`arg_groups/cuda_graph_hook.py` of SGLang).

By default SGLang captures a graph for each of 58 sizes up to `chunked_prefill_size`, and compiles a kernel for each if
its caches are cold. A forward pass is padded to the next size. One with more tokens than the largest size runs without
a graph: it takes long enough to hide the launches of its kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.servers import OptionValue

TOKENS: Final = (32, 64, 128, 256, 512, 1024)
"""Sizes that are captured. A forward pass is padded to 32 tokens, or to less than twice its tokens."""
CHOICES: Final = {
    "cuda_graph_bs_prefill",
    "cuda_graph_max_bs_prefill",
    "cuda_graph_backend_prefill",
    "cuda_graph_config",
    "disable_prefill_cuda_graph",
    "disable_cuda_graph",
}
"""SGLang's options that choose graphs of prefills."""


def options_for(options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the option that bounds the sizes, or nothing if the user's options choose graphs.

    Args:
        options: the user's options by name, with underscores.
    """
    if CHOICES & options.keys():
        return {}
    bounds = [options[name] for name in ("chunked_prefill_size", "max_total_tokens") if name in options]
    largest = min([int(bound) for bound in bounds if isinstance(bound, int) and bound > 0], default=max(TOKENS))
    sizes: list[int | float | str] = [tokens for tokens in TOKENS if tokens <= largest]
    return {"cuda_graph_bs_prefill": sizes} if sizes else {}
