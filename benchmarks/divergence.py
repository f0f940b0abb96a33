"""What a divergence to another model costs at the head, beside log-probabilities: milliseconds and memory, one run.

    python benchmarks/divergence.py --tokens 32768                          # a GPU, the sizes of Qwen2-1.5B
    python benchmarks/divergence.py --tokens 256 --hidden 64 --vocabulary 4000 --repeat 2     # anywhere

Values and gradients of all tokens, from hidden states; the layers of neither model are in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch

from areal_fsdp.models.logprobs import default_chunk_tokens, token_logprobs
from areal_fsdp.models.wide import Head, wide_output

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 2**30


def make_head(tokens: int, hidden: int, vocabulary: int, device: torch.device, *, learns: bool) -> Head:
    """Random, in bfloat16; logits have a standard deviation of about 2."""
    states = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_(learns)
    weight = (2 * hidden**-0.5 * torch.randn(vocabulary, hidden, device=device)).bfloat16().requires_grad_(learns)
    return Head(states, weight, None, 1.0)


def measure(compute: Callable[[], torch.Tensor], device: torch.device, repeat: int) -> tuple[float, float]:
    """Milliseconds, the median, and the most memory beyond what was there before, GiB (0 on a CPU)."""
    seconds: list[float] = []
    before = peak = 0
    for _ in range(repeat + 1):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        torch.autograd.backward(compute().sum())
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[1:]), peak / GIB


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (arguments.tokens, arguments.hidden, arguments.vocabulary, device)
    own, other = make_head(*sizes, learns=True), make_head(*sizes, learns=False)
    targets = torch.randint(arguments.vocabulary, (arguments.tokens,), device=device)
    chunk = default_chunk_tokens(arguments.vocabulary, device)

    def logprobs() -> torch.Tensor:
        return token_logprobs(
            own.hidden,
            own.weight,
            None,
            targets,
            temperature=1.0,
            chunk_tokens=chunk,
            with_entropy=False,
            compiled=device.type == "cuda",
        )[0]

    def wide(name: str) -> Callable[[], torch.Tensor]:
        return lambda: wide_output(name, own, {"teacher": other}, chunk)[name]

    rows = {"log-probabilities": logprobs, "topk:32": wide("topk:32")}
    rows |= {f"divergence, beta {beta}": wide(f"divergence:teacher:{beta}") for beta in (0, 0.5, 1)}
    print(f"{arguments.tokens} tokens, {arguments.vocabulary} ids, logits of {chunk} tokens at once, {device}")
    print("| | ms | GiB |\n|---|---|---|")
    for name, compute in rows.items():
        milliseconds, memory = measure(compute, device, arguments.repeat)
        own.hidden.grad = own.weight.grad = None
        print(f"| {name} | {milliseconds:.1f} | {memory:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
