"""Convolutions of packed sequences equal those of single sequences."""

import pytest
import torch
import torch.nn.functional as F

from areal_fsdp.models.convolutions import packed_convolution

LENGTHS = (5, 1, 2, 7)
CHANNELS, TAPS = 6, 4


@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients(has_bias):
    torch.manual_seed(0)
    hidden = torch.randn(1, CHANNELS, sum(LENGTHS), requires_grad=True)
    weight = torch.randn(CHANNELS, TAPS, requires_grad=True)
    bias = torch.randn(CHANNELS, requires_grad=True) if has_bias else None
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    wanted = [
        F.conv1d(part, weight[:, None], bias, padding=TAPS - 1, groups=CHANNELS)[..., : part.shape[-1]]
        for part in hidden.split(LENGTHS, -1)
    ]
    compare(
        packed_convolution(hidden, weight, bias, numbers),
        torch.cat(wanted, -1),
        [hidden, weight, *filter(torch.is_tensor, [bias])],
    )


def compare(found, wanted, inputs):
    factors = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad((output * factors).sum(), inputs) for output in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_half_precision_is_rounded_once():
    hidden = torch.randn(1, CHANNELS, 9, dtype=torch.bfloat16)
    weight = torch.randn(CHANNELS, TAPS, dtype=torch.bfloat16)
    numbers = torch.zeros(1, 9, dtype=torch.int32)
    exact = packed_convolution(hidden.float(), weight.float(), None, numbers)
    torch.testing.assert_close(packed_convolution(hidden, weight, None, numbers), exact.bfloat16(), rtol=0, atol=0)


def test_sequences_do_not_mix():
    hidden = torch.ones(1, CHANNELS, 6)
    hidden[..., :3] = torch.nan
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    mixed = packed_convolution(hidden, torch.ones(CHANNELS, TAPS), None, numbers)
    assert mixed[0, 0, 3:].tolist() == [1, 2, 3]
