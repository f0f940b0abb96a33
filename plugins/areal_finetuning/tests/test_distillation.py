"""Distillation against loops by index and against the true gradient of the divergence, in float64."""

import math

import pytest
import torch

from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, Ragged
from areal_core.sdk import PolicyTerms
from areal_core.training.context import BatchContext
from areal_finetuning.config import GKDSettings
from areal_finetuning.distillation import GeneralizedDistillation, distillation, teacher_kl


def make(count=40, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    proximal, teacher = (-3 * torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(count, generator=generator) < 0.6
    tokens = {"input_ids": torch.zeros(count, dtype=torch.int64), "loss_mask": mask}
    tokens |= {"proximal_logprobs": proximal.to(dtype), "teacher_logprobs": teacher.to(dtype)}
    return PackedBatch(Ragged(torch.tensor([count // 4, count - count // 4]), tokens))


def terms_of(logprobs, advantages, teacher, mask):
    count = len(logprobs)
    index = torch.zeros(count, dtype=torch.int64)
    same = logprobs.detach()
    return PolicyTerms(logprobs, same, same, advantages, mask, index, 1, columns={"teacher_logprobs": teacher})


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_advantage_loss_and_gradient_are_those_of_the_loop(coefficient):
    batch = make()
    found = teacher_kl(batch, coefficient=coefficient)
    wanted = [
        -coefficient * (float(batch["proximal_logprobs"][t]) - float(batch["teacher_logprobs"][t]))
        if bool(batch["loss_mask"][t])
        else 0.0
        for t in range(batch.token_count)
    ]
    assert found.tolist() == pytest.approx(wanted, abs=1e-10)
    logprobs = (batch["proximal_logprobs"] + 0.1).requires_grad_()
    losses, logged = distillation(terms_of(logprobs, found, batch["teacher_logprobs"], batch["loss_mask"]))
    each = [-a * float(p) for a, p in zip(wanted, logprobs.detach(), strict=True)]
    assert losses.tolist() == pytest.approx(each, abs=1e-12)
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-a for a in wanted], abs=1e-12)
    assert torch.equal(logged["teacher_kl"], logprobs.detach() - batch["teacher_logprobs"])
    assert teacher_kl(make(dtype=torch.float32), coefficient=coefficient).dtype == torch.float32


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over a whole vocabulary, each token as often as the policy writes it."""
    generator = torch.Generator().manual_seed(8)
    logits, of_teacher = (2 * torch.randn(17, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    policy, teacher = torch.log_softmax(logits, -1), torch.log_softmax(of_teacher, -1)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    everywhere = torch.ones(17, dtype=torch.bool)
    tokens = {"input_ids": torch.arange(17), "loss_mask": everywhere}
    tokens |= {"proximal_logprobs": policy.detach(), "teacher_logprobs": teacher}
    advantages = teacher_kl(PackedBatch(Ragged(torch.tensor([17]), tokens)), coefficient=1.0)
    losses, logged = distillation(terms_of(policy, advantages, teacher, everywhere))
    (found,) = torch.autograd.grad((policy.detach().exp() * losses).sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert float((policy.exp() * logged["teacher_kl"]).sum().detach()) == pytest.approx(float(divergence.detach()))


def test_what_is_infinite_outside_of_the_mask_stays_outside():
    batch = make()
    spoiled = batch.with_tokens(teacher_logprobs=batch["teacher_logprobs"].masked_fill(~batch["loss_mask"], -math.inf))
    assert torch.equal(teacher_kl(spoiled, coefficient=1.0), teacher_kl(batch, coefficient=1.0))


def test_the_divergence_is_weighed_by_token():
    """Against a loop by index; tokens out of the mask count nothing, whatever the models say there."""
    algorithm = GeneralizedDistillation(GKDSettings(loss_aggregation={"type": "core/token_mean"}, beta=0.25))
    batch = make().with_sequences(group_id=torch.arange(2))
    context = BatchContext(TrainingSection(), {})
    ((work,),) = algorithm.updates(algorithm.prepare(batch, context), context)
    assert (work.role, work.outputs) == ("actor", ("divergence:teacher:0.25",))
    divergence = torch.rand(batch.token_count, dtype=torch.float64)
    divergence[~batch["loss_mask"]] = math.inf
    divergence.requires_grad_()
    result = work.loss(work.batch, {work.outputs[0]: divergence})
    counted = [t for t in range(batch.token_count) if batch["loss_mask"][t]]
    wanted = sum(float(divergence[t].detach()) for t in counted) / len(counted)
    assert float(result.loss.detach()) == pytest.approx(wanted, rel=1e-6)
    assert result.metrics["teacher_divergence"].as_numbers("d") == {"d": pytest.approx(wanted, rel=1e-6)}
    result.loss.backward()
    expected = [1 / len(counted) if t in counted else 0.0 for t in range(batch.token_count)]
    assert divergence.grad.tolist() == pytest.approx(expected, rel=1e-6)
