"""The critic's loss against a loop over tokens that is written from PPO's code, values and gradients, in float64."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from areal_core.algorithms.loss_aggregation import token_mean
from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, Ragged, combine
from areal_core.training.context import BatchContext
from areal_grpo.auxiliary_losses import value_regression
from areal_testing.conformance import numbers_of

NUMBERS = st.floats(-3, 3)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12)
CONTEXT = BatchContext(TrainingSection(), {})


def make_minibatch(tokens, dtype=torch.float64):
    """Sequences of three tokens and a last one of what is left; values are (new, old, return, in the loss)."""
    lengths = [3] * (len(tokens) // 3) + ([len(tokens) % 3] if len(tokens) % 3 else [])
    _, old, returns, mask = zip(*tokens, strict=True)
    columns = {
        "input_ids": torch.zeros(len(tokens), dtype=torch.int64),
        "loss_mask": torch.tensor(mask),
        "values": torch.tensor(old, dtype=dtype),
        "returns": torch.tensor(returns, dtype=dtype),
    }
    batch = PackedBatch(Ragged(torch.tensor(lengths), columns))
    return batch.with_tokens(loss_weights=token_mean(batch).to(dtype))


def naive(tokens, clip):
    """Loss, gradient by token, and what is logged: one token after another."""
    inside = [i for i, token in enumerate(tokens) if token[3]]
    count = max(len(inside), 1)
    mean = sum(tokens[i][2] for i in inside) / count
    variance = sum((tokens[i][2] - mean) ** 2 for i in inside) / count
    loss, gradient, clipped, explained = 0.0, [0.0] * len(tokens), 0, 0.0
    for i in inside:
        new, old, target, _ = tokens[i]
        plain = 0.5 * (new - target) ** 2
        bounded, slope = plain, new - target
        if clip is not None and abs(new - old) > clip:
            near = old + math.copysign(clip, new - old)
            bounded = 0.5 * (near - target) ** 2
            if bounded > plain:
                slope, clipped = 0.0, clipped + 1
        loss += max(plain, bounded) / count
        gradient[i] = slope / count
        explained += (1 - (new - target) ** 2 / variance) / count if variance > 0 else 0.0
    return loss, gradient, clipped / count, explained


@pytest.mark.parametrize("clip", [0.2, 1.0, None])
@given(tokens=TOKENS)
@example(tokens=[(1.6e-159, 0.5, 1.6e-159, True)])
def test_token_by_token(clip, tokens):
    # Where clipping begins, and where both terms are equal, the derivative is anything between those of both sides.
    if clip is not None and any(abs(abs(new - old) - clip) < 1e-9 for new, old, _, _ in tokens):
        return
    minibatch = make_minibatch(tokens)
    work = value_regression(minibatch, CONTEXT, clip=clip)
    assert (work.role, tuple(work.outputs)) == ("critic", ("values",))
    values = torch.tensor([token[0] for token in tokens], dtype=torch.float64, requires_grad=True)
    result = work.loss(work.batch, {"values": values})
    result.loss.backward()
    loss, gradient, clipped, explained = naive(tokens, clip)
    numbers = numbers_of(result.metrics)
    assert result.loss.dtype == torch.float64
    # token_mean itself is float32.
    assert result.loss.item() == pytest.approx(loss, rel=1e-6, abs=1e-10)
    torch.testing.assert_close(values.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-6, atol=1e-10)
    assert numbers["value_loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert numbers["value_clip_fraction"] == pytest.approx(clipped)
    assert numbers["explained_variance"] == pytest.approx(explained, rel=1e-6, abs=1e-6)


def test_trls_value_loss():
    """TRL's PPOTrainer: 0.5 · masked_mean(max((V - R)², (clamp(V, V_old - c, V_old + c) - R)²))."""
    draw = torch.Generator().manual_seed(0)
    new, old, returns = (torch.randn(30, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(30, generator=draw) < 0.6
    ours, theirs = (new.clone().requires_grad_() for _ in range(2))
    clipped = torch.clamp(theirs, old - 0.2, old + 0.2)
    larger = torch.max(torch.square(theirs - returns), torch.square(clipped - returns))
    (0.5 * larger[mask].mean()).backward()
    rows = list(zip(new.tolist(), old.tolist(), returns.tolist(), mask.tolist(), strict=True))
    minibatch = make_minibatch(rows)
    minibatch = minibatch.with_tokens(loss_weights=mask.double() / mask.sum())
    work = value_regression(minibatch, CONTEXT, clip=0.2)
    work.loss(work.batch, {"values": ours}).loss.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


@given(tokens=TOKENS, seed=st.integers(0, 1000))
def test_what_it_logs_adds_up_over_microbatches(tokens, seed):
    work = value_regression(make_minibatch(tokens), CONTEXT, clip=0.2)
    values = torch.tensor([token[0] for token in tokens], dtype=torch.float64)
    offsets = work.batch.tokens.offsets.tolist()
    whole = work.loss(work.batch, {"values": values})
    parts = [
        work.loss(work.batch.select([row]), {"values": values[offsets[row] : offsets[row + 1]]})
        for row in range(len(work.batch))
    ]
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss))
    together = numbers_of(combine([part.metrics for part in parts]))
    assert together == pytest.approx(numbers_of(whole.metrics))


def test_explained_variance_is_that_of_the_whole_update():
    tokens = [(1.0, 0.0, 1.0, True), (0.5, 0.0, 0.0, True), (2.5, 0.0, 3.0, True), (9.0, 0.0, 9.0, False)]
    returns, errors = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, 0.5, 0.5])
    work = value_regression(make_minibatch(tokens), CONTEXT, clip=None)
    found = numbers_of(work.loss(work.batch, {"values": torch.tensor([t[0] for t in tokens])}).metrics)
    wanted = 1 - errors.square().mean() / returns.var(correction=0)
    assert found["explained_variance"] == pytest.approx(float(wanted), rel=1e-6)


def test_what_stands_outside_the_mask_reaches_no_gradient():
    minibatch = make_minibatch([(0.0, math.nan, math.inf, False), (1.0, 0.5, 2.0, True)])
    work = value_regression(minibatch, CONTEXT, clip=0.2)
    values = torch.tensor([math.inf, 1.0], dtype=torch.float64, requires_grad=True)
    result = work.loss(work.batch, {"values": values})
    result.loss.backward()
    assert values.grad[0] == 0
    assert values.grad.isfinite().all()
    assert all(math.isfinite(number) for number in numbers_of(result.metrics).values())


def test_an_update_without_a_token_in_the_loss_learns_nothing():
    work = value_regression(make_minibatch([(0.0, 1.0, 2.0, False)] * 2), CONTEXT, clip=0.2)
    result = work.loss(work.batch, {"values": torch.ones(2, dtype=torch.float64)})
    assert float(result.loss) == 0
