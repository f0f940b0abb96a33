"""How many CUDA graphs of a prefill SGLang captures at its start: `arg_groups/cuda_graph_hook.py` of SGLang.

SGLang alone captures one for each of 58 sizes up to `chunked_prefill_size`, with a kernel compiled for each where its
caches are cold. A forward pass is padded to the next size, and one with more tokens than the largest size has runs
without a graph: it is long enough to hide what launching its kernels takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.servers import OptionValue

TOKENS: Final = (32, 64, 128, 256, 512, 1024)
"""Sizes that are captured: each forward pass is padded to less than twice its tokens, or to 32."""
CHOICES: Final = {
    "cuda_graph_bs_prefill",
    "cuda_graph_max_bs_prefill",
    "cuda_graph_backend_prefill",
    "cuda_graph_config",
    "disable_prefill_cuda_graph",
    "disable_cuda_graph",
}
"""Options of SGLang by which a user chooses graphs of a prefill."""


def options_for(options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Return the bound for a server with these options, whose names have underscores; nothing if they choose graphs."""
    if CHOICES & options.keys():
        return {}
    bounds = [options[name] for name in ("chunked_prefill_size", "max_total_tokens") if name in options]
    largest = min([int(bound) for bound in bounds if isinstance(bound, int) and bound > 0], default=max(TOKENS))
    sizes: list[int | float | str] = [tokens for tokens in TOKENS if tokens <= largest]
    return {"cuda_graph_bs_prefill": sizes} if sizes else {}
