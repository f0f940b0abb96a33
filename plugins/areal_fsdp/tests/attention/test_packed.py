import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_fsdp.attention.packed import PackedLayout, packed_attention


def one_by_one(query, key, value, lengths, scale=None, window=None):
    outputs, start = [], 0
    for length in lengths:
        q, k, v = (t[start : start + length].transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        outputs.append((scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)


def make_inputs(lengths, heads=4, key_heads=2, size=8, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    return [
        torch.randn(total, count, size, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]


def assert_same(lengths, tolerance=1e-10, **options):
    inputs = make_inputs(lengths)
    upstream = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    packed = packed_attention(*inputs, PackedLayout.from_lengths(lengths), **options)
    gradients = torch.autograd.grad(packed, inputs, upstream)
    naive = one_by_one(*inputs, lengths, **options)
    expected = torch.autograd.grad(naive, inputs, upstream)
    torch.testing.assert_close(packed, naive, atol=tolerance, rtol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=tolerance, rtol=0)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_equals_one_by_one_in_values_and_gradients(lengths):
    assert_same(lengths)


@pytest.mark.parametrize("lengths", [[5], [7, 7, 7], [1, 1], [100, 3, 60, 99, 1]])
def test_scale_and_window(lengths):
    assert_same(lengths, scale=0.3)
    assert_same(lengths, window=4)
    assert_same(lengths, window=1)


def test_as_many_key_heads_as_heads():
    query, _, _ = make_inputs([6, 2])
    layout = PackedLayout.from_lengths([6, 2])
    torch.testing.assert_close(packed_attention(query, query, query, layout), one_by_one(query, query, query, [6, 2]))


def test_a_sequence_does_not_see_another():
    query, key, value = make_inputs([6, 9, 4])
    layout = PackedLayout.from_lengths([6, 9, 4])
    before = packed_attention(query, key, value, layout)
    with torch.no_grad():
        key[6:15] += 1
        value[6:15] += 1
    after = packed_attention(query, key, value, layout)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[15:], after[15:])
    assert not torch.allclose(before[6:15], after[6:15])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_a_layout_keeps_all_tokens_and_pads_little(lengths):
    layout = PackedLayout.from_lengths(lengths)
    total = sum(lengths)
    assert torch.equal(layout.padded_from_packed[layout.packed_from_padded], torch.arange(total))
    places = sum(rows * width for rows, width in layout.buckets)
    assert places == len(layout.padded_from_packed) == total + (0 if layout.padding is None else len(layout.padding))
    assert places <= total / 0.75 + 22 * len(lengths)
    assert torch.equal(layout.position_ids, torch.cat([torch.arange(length) for length in lengths]))
    assert layout.bounds.dtype == torch.int32
    assert layout.bounds.tolist() == F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).tolist()


def test_sequences_of_equal_length_are_not_moved():
    assert PackedLayout.from_lengths([4, 4, 4]).is_identity
    assert not PackedLayout.from_lengths([4, 5, 4]).is_identity


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.from_lengths(lengths)
