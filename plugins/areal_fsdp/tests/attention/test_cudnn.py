"""cuDNN's adapter with a plan that computes on the CPU, in cuDNN's memory order."""

import torch

from areal_fsdp.attention import cudnn
from areal_fsdp.attention.packed import Reach

HEADS, KEY_HEADS, SIZE, TOKENS = 4, 2, 8, 5


class Plan:
    """Writes the statistics of token t and head h as 10 t + h, and reads them in the backward pass."""

    def run(self, shape, bounds, tensors):
        statistics = 10.0 * torch.arange(TOKENS)[:, None] + torch.arange(HEADS)
        in_memory = tensors["stats"].as_strided((TOKENS, HEADS), (HEADS, 1))
        if "gradient" in tensors:
            assert torch.equal(in_memory, statistics)
        else:
            in_memory.copy_(statistics)


def test_the_denominator_has_the_order_of_other_kernels(monkeypatch):
    """Attention sinks add to it, head by head."""
    monkeypatch.setattr(cudnn, "_plan", lambda shape, is_backward: Plan())
    query = torch.randn(TOKENS, HEADS, SIZE)
    key = torch.randn(TOKENS, KEY_HEADS, SIZE)
    bounds = torch.tensor([0, TOKENS], dtype=torch.int32)
    reach = Reach(TOKENS, 1.0, 0)
    out, denominator = cudnn.forward(query, key, key, bounds, reach)
    assert denominator.tolist() == [[10.0 * token + head for token in range(TOKENS)] for head in range(HEADS)]
    cudnn.backward(out, query, key, key, out, denominator.contiguous(), bounds, reach)
