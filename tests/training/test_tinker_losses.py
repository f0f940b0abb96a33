"""The losses that Tinker defines against those of areal_grpo with the same formula."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from areal_core.sdk import PolicyTerms
from areal_grpo.losses import ppo_clip
from areal_grpo.sequence_losses import gspo
from areal_grpo.weighted_losses import cispo
from areal_tinker.losses import LOSSES, Terms, total

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "areal_tinker" / "tests"))

from sample_terms import ROWS, make


@pytest.mark.parametrize(
    ("name", "other", "settings"),
    [
        ("ppo", ppo_clip, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        ("cispo", cispo, {"clip_low": 0.2, "clip_high": 0.2}),
        ("gspo", gspo, {"clip_low": 0.2, "clip_high": 0.2}),
    ],
)
def test_a_loss_has_the_gradient_of_areal_grpo_s(name, other, settings):
    terms = make(3)
    mask = terms.inputs["sequence_ratio_mask"].bool()
    inputs = {**terms.inputs, "mask": mask.float()}
    total(LOSSES[name], Terms(terms.logprobs, inputs, {}, ROWS, 3)).backward()
    logprobs = terms.logprobs.detach().clone().requires_grad_()
    q = terms.inputs["logprobs"]
    losses, _ = other(PolicyTerms(logprobs, q, q, terms.inputs["advantages"], mask, ROWS, 3), **settings)
    losses.where(mask, 0.0).sum().backward()
    torch.testing.assert_close(terms.logprobs.grad, logprobs.grad, atol=1e-6, rtol=0)
