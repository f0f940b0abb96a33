"""The reward model's loss against a loop by index, and against the formula that TRL publishes, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from areal_finetuning.reward_model import reward_losses
from areal_testing.conformance import numbers_of


def by_index(batch, values, centering):
    """The mean loss of the pairs, and the scores of each, number by number."""
    offsets = batch.tokens.offsets.tolist()
    losses, scores = [], []
    for rows in batch.unit_rows:
        score, margin = {}, 0.0
        for row in rows:
            last = offsets[row + 1] - 1
            score[bool(batch["is_chosen"][row])] = values[last]
            margin = float(batch["margin"][row]) if "margin" in batch else 0.0
        probability = 1 / (1 + torch.exp(-(score[True] - score[False] - margin)))
        losses.append(-torch.log(probability) + centering * (score[True] + score[False]) ** 2)
        scores.append((float(score[True].detach()), float(score[False].detach())))
    return sum(losses) / len(losses), scores


def values_of(batch, dtype=torch.float64):
    generator = torch.Generator().manual_seed(12)
    return (2 * torch.randn(batch.token_count, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


@pytest.mark.parametrize("centering", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("has_margin", [True, False])
def test_loss_and_gradient_are_those_of_the_loop(centering, has_margin, pairs, build, one_update):
    if not has_margin:
        del pairs.sequences["margin"]
    (work,) = one_update(build("algorithms", "reward_model", centering=centering), pairs)
    assert (work.role, work.outputs) == ("reward", ("values",))
    values = values_of(pairs)
    wanted, scores = by_index(pairs, values, centering)
    (gradient,) = torch.autograd.grad(wanted, values)
    result = work.loss(work.batch, {"values": values})
    (found,) = torch.autograd.grad(result.loss, values)
    assert float(result.loss) == pytest.approx(float(wanted), abs=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    assert found.nonzero()[:, 0].tolist() == (pairs.tokens.offsets[1:] - 1).tolist(), "only last tokens are scored"
    numbers = numbers_of(result.metrics)
    assert numbers["accuracy"] == sum(c > r for c, r in scores) / 4
    assert numbers["margin"] == pytest.approx(sum(c - r for c, r in scores) / 4)
    assert numbers["chosen_reward"] == pytest.approx(sum(c for c, _ in scores) / 4)
    single = values.detach().float().requires_grad_()
    result = work.loss(work.batch, {"values": single})
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    assert float(result.loss) == pytest.approx(float(wanted), rel=1e-5)
    torch.testing.assert_close(single.grad.double(), gradient, rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_trl():
    """-logsigmoid(chosen - rejected - margin).mean(), plus coefficient x mean((chosen + rejected)²)."""
    generator = torch.Generator().manual_seed(5)
    chosen, rejected = (torch.randn(64, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margin = torch.rand(64, generator=generator, dtype=torch.float64)
    wanted = -F.logsigmoid(chosen - rejected - margin).mean() + 0.01 * torch.mean((chosen + rejected) ** 2)
    found = reward_losses(chosen, rejected, margin, centering=0.01).mean()
    assert float(found) == pytest.approx(float(wanted), abs=1e-14)
    for one, other in zip(
        torch.autograd.grad(found, (chosen, rejected), retain_graph=True),
        torch.autograd.grad(wanted, (chosen, rejected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_equal_scores_are_undecided(pairs, build, one_update):
    del pairs.sequences["margin"]
    (work,) = one_update(build("algorithms", "reward_model"), pairs)
    result = work.loss(work.batch, {"values": torch.ones(pairs.token_count)})
    assert float(result.loss) == pytest.approx(math.log(2))
    assert numbers_of(result.metrics)["accuracy"] == 0.5
