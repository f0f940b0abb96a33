import math

import pytest
import torch

from areal_core.sdk import LossResult
from areal_fsdp.config import FSDPConfig
from areal_fsdp.models.schedule import learning_rate_at
from areal_fsdp.optimizer import make_optimizer, step
from areal_fsdp.parallel.gradients import gradient_norm
from areal_fsdp.parallel.mesh import Ranks


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


@pytest.mark.parametrize(("max_norm", "scale"), [(0.5, 1), (1e6, 1), (None, 1), (0.5, torch.nan), (0.5, torch.inf)])
def test_step_clips_like_torch_and_skips_infinite_gradients(max_norm, scale):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    config = FSDPConfig(learning_rate=0.1, epsilon=1e-2)
    optimizer = make_optimizer(parameters, config)
    plain = torch.optim.AdamW(copies, lr=0.1, betas=config.betas, eps=1e-2, weight_decay=0.0)
    before = [p.detach().clone() for p in parameters]
    for factor in (1, 3):
        for copy, parameter in zip(copies, parameters, strict=True):
            parameter.grad = factor * torch.randn(5) * scale
            copy.grad = parameter.grad.clone()
        norm = gradient_norm([p.grad for p in parameters], Ranks())
        if max_norm:
            wanted = torch.nn.utils.clip_grad_norm_(copies, max_norm)
            torch.testing.assert_close(norm, wanted, equal_nan=True)
        step([optimizer], norm, max_norm, None)
        assert all(p.grad is None for p in parameters)
        if scale == 1:
            plain.step()
    for copy, parameter, old in zip(copies, parameters, before, strict=True):
        torch.testing.assert_close(parameter, copy if scale == 1 else old)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0 if scale == 1 else 0.0}


def test_the_default_learning_rate_is_the_algorithm_s(make_engine, program, batch):
    engine = make_engine(learning_rate=None)  # `OptimizerSettings` of the fixture has what RL learns with
    assert program.train(engine, batch)["learning_rate"] == 1e-6
    adapted = make_engine(learning_rate=None, adapter={"rank": 4})
    assert program.train(adapted, batch)["learning_rate"] == pytest.approx(1e-5)


def test_the_schedule_counts_skipped_updates(make_engine, program, batch):
    """Otherwise a run with many empty batches would end with a high learning rate."""
    engine = make_engine(schedule="linear", total_updates=4)
    losses = (
        lambda part, outputs: LossResult(outputs["logprobs"].sum() * 0),
        lambda part, outputs: LossResult(outputs["logprobs"].sum() * torch.nan),
        program.policy_loss,
        program.policy_loss,
    )
    rates = [float(program.train(engine, batch, loss)["learning_rate"]) for loss in losses]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
