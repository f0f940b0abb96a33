import math

import pytest
import torch

from areal_fsdp.config import FSDPConfig
from areal_fsdp.optimizer import clip_gradients, gradient_norm, learning_rate_at, make_optimizer


def rates(updates, total=20, **settings):
    config = FSDPConfig(learning_rate=0.1, **settings)
    return [learning_rate_at(update, config, total) for update in updates]


def test_warm_up_rises_linearly_and_never_starts_at_zero():
    assert rates(range(6), warmup_steps=4) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_linear_and_cosine_end_at_the_minimum():
    linear = rates([4, 12, 20, 99], warmup_steps=4, schedule="linear", minimum_learning_rate_ratio=0.1)
    assert linear == pytest.approx([0.1, 0.055, 0.01, 0.01])
    cosine = rates([4, 8, 20, 99], warmup_steps=4, schedule="cosine")
    assert cosine == pytest.approx([0.1, 0.05 * (1 + math.cos(math.pi / 4)), 0.0, 0.0])


def test_equals_torch_adamw_with_decay_for_matrices_only():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    config = FSDPConfig(learning_rate=0.01, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1)
    optimizer = make_optimizer(ours, config)
    plain = torch.optim.AdamW(
        [{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False,
    )  # fmt: skip
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        plain.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_clipping_is_that_of_torch():
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(5)
    copies = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    norm = gradient_norm(parameters)
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(copies, 0.5)))
    clip_gradients(parameters, 0.5, float(norm))
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(copy.grad, parameter.grad)
    untouched = parameters[0].grad.clone()
    clip_gradients(parameters, 100.0, 0.5)
    assert torch.equal(untouched, parameters[0].grad)
