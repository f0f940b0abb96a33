"""Heads whose values have another size than their keys, as in latent attention, and sizes without a kernel."""

import pytest
import torch

from areal_fsdp.attention.hugging_face import Layout, kernel_head_size, packed_attention_of_a_layer

LENGTHS, HEADS = [5, 1, 9], 2


@pytest.mark.parametrize("sizes", [(12, 8), (8, 12), (24, 16), (5, 5)])
def test_the_compiled_operation_computes_heads_of_two_sizes(sizes):
    torch.manual_seed(0)
    key_size, value_size = sizes
    shapes = [(1, HEADS, sum(LENGTHS), size) for size in (key_size, key_size, value_size)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    attend = {"": packed_attention_of_a_layer}
    attend["torch"] = torch.compile(packed_attention_of_a_layer, backend="aot_eager")  # knows the operation's sizes
    found = []
    for kernel in ("torch", ""):  # on a CPU the operation computes as without a kernel, on heads of one size
        layout = Layout.of(LENGTHS, torch.device("cpu"), kernel).packed
        attended, _ = attend[kernel](torch.nn.Module(), *tensors, None, packed_layout=layout)
        assert attended.shape == (1, sum(LENGTHS), HEADS, value_size)
        weights = torch.linspace(-1, 2, attended.numel()).view_as(attended)
        found.append([attended, *torch.autograd.grad(attended, tensors, weights)])
    torch.testing.assert_close(found[0], found[1])


def test_head_sizes_are_padded_to_multiples_of_8():
    assert [kernel_head_size(5), kernel_head_size(192, 128), kernel_head_size(64)] == [8, 192, 64]
