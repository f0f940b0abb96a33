"""Terms of three sequences for tests of losses. Imported by path."""

from __future__ import annotations

import torch

from areal_tinker.losses import Terms

ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])


def make(seed=0, **settings):
    """Return terms of three sequences with ratios on both sides of the bounds."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = (-torch.rand(8, generator=generator)).requires_grad_()
    inputs = {
        "logprobs": logprobs.detach() + 0.5 * torch.randn(8, generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "weights": torch.rand(8, generator=generator),
        "sequence_ratio_mask": torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 1]),
    }
    return Terms(logprobs, inputs, settings, ROWS, 3)
