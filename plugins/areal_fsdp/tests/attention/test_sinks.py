"""Attention sinks have the values and gradients of a softmax with one more column, with and without a kernel."""

import pytest
import torch

from areal_fsdp.attention import hugging_face, kernels
from areal_fsdp.attention.hugging_face import GraphLayout
from areal_fsdp.attention.packed import PackedLayout, packed_attention

LENGTHS, HEADS, KEY_HEADS, SIZE = [5, 1, 9], 4, 2, 8


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    sinks = torch.tensor([-1.0, 0.0, 0.7, 3.0], dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (*tensors, sinks)]


def by_hand(query, key, value, sinks, window):
    """Return [T, heads, size], computed for each sequence, head and token separately."""
    found, start = [], 0
    for length in LENGTHS:
        for place in range(length):
            first = start if window is None else max(start, start + place - window + 1)
            seen = slice(first, start + place + 1)
            for head in range(HEADS):
                group = head * KEY_HEADS // HEADS
                scores = key[seen, group] @ query[start + place, head] * SIZE**-0.5
                share = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
                found.append(share @ value[seen, group])
        start += length
    return torch.stack(found).view(start, HEADS, SIZE)


def with_gradients(function):
    tensors = inputs()
    attended = function(*tensors)
    weights = torch.linspace(-1, 2, attended.numel(), dtype=torch.float64).view_as(attended)
    return [attended, *torch.autograd.grad(attended, tensors, weights)]


def in_a_graph(query, key, value, sinks, window):
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    layout = GraphLayout(bounds, bounds, "by lse")
    return torch.ops.areal_attention.attention(query, key, value, sinks, *layout, SIZE**-0.5, window or 0)[0]


def kernel():
    """Return a kernel without sinks whose backward pass, like FlashAttention's, reads only the output and the lse."""

    def scores(q, k, bounds, reach):
        k = k.repeat_interleave(HEADS // KEY_HEADS, 1)
        row = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
        place = torch.arange(len(q))
        seen = (row[:, None] == row) & (place[:, None] >= place)
        if reach.window:
            seen &= place[:, None] - place < reach.window
        return (torch.einsum("thd,shd->hts", q, k) * reach.scale).masked_fill(~seen, -torch.inf)

    def forward(q, k, v, bounds, reach):
        logits = scores(q, k, bounds, reach)
        out = torch.einsum("hts,shd->thd", logits.softmax(-1), v.repeat_interleave(HEADS // KEY_HEADS, 1))
        return out, logits.logsumexp(-1)

    def backward(grad, q, k, v, out, lse, bounds, reach):
        p = (scores(q, k, bounds, reach) - lse[..., None]).exp()
        wide = v.repeat_interleave(HEADS // KEY_HEADS, 1)
        ds = p * (torch.einsum("thd,shd->hts", grad, wide) - (grad * out).sum(-1).t()[..., None]) * reach.scale
        of_q = torch.einsum("hts,shd->thd", ds, k.repeat_interleave(HEADS // KEY_HEADS, 1))
        of_k, of_v = torch.einsum("hts,thd->shd", ds, q), torch.einsum("hts,thd->shd", p, grad)
        folded = [part.unflatten(1, (KEY_HEADS, -1)).sum(2) for part in (of_k, of_v)]
        return of_q, folded[0], folded[1]

    return kernels.Kernel("by lse", forward, backward)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("way", ["packed", "graph", "kernel"])
def test_value_and_gradients(way, window, monkeypatch):
    if way == "kernel":
        monkeypatch.setitem(kernels._MAKERS, "by lse", kernel)
        monkeypatch.setattr(hugging_face, "_has_kernel", lambda query: True)
        kernels._kernel.cache_clear()
    wanted = with_gradients(lambda *tensors: by_hand(*tensors, window))
    layout = PackedLayout.from_lengths(LENGTHS)
    found = with_gradients(
        (lambda q, k, v, sinks: packed_attention(q, k, v, layout, window=window, sinks=sinks))
        if way == "packed"
        else (lambda *tensors: in_a_graph(*tensors, window))
    )
    kernels._kernel.cache_clear()
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_a_large_negative_sink_has_no_effect():
    q, k, v, _ = inputs()
    layout = PackedLayout.from_lengths(LENGTHS)
    away = packed_attention(q, k, v, layout, sinks=torch.full((HEADS,), -1e9, dtype=torch.float64))
    torch.testing.assert_close(away, packed_attention(q, k, v, layout))
