"""What is computed just before an update: whom M2PO trusts, and where the entropy is led."""

import pytest
import torch
from composed import GROUP, REWARDS, Engine, build
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.config.sections import TrainingSection
from areal_core.training.context import BatchContext
from areal_grpo.config import (
    GRPOSettings,
    M2POSettings,
)
from areal_grpo.minibatch_transforms import m2po
from areal_testing.conformance import numbers_of


def trusted_by_index(differences, advantages, threshold, among):
    """M2PO, arXiv 2510.01161, Algorithm 1: of the trust-region tokens leave out the largest until their mean fits."""
    pairs = enumerate(zip(differences, advantages, strict=True))
    left = [at for at, (difference, advantage) in pairs if among == "all" or difference * advantage > 0]
    left.sort(key=lambda at: differences[at] ** 2)
    out = set()
    while left and sum(differences[at] ** 2 for at in left) / len(left) > threshold:
        out.add(left.pop())
    return [at not in out for at in range(len(differences))]


@settings(max_examples=40)
@given(data=st.data())
def test_m2po_trusts_what_the_paper_trusts_in_any_order(data, make_batch):
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], seed=data.draw(st.integers(0, 9)))
    spread = data.draw(st.sampled_from([0.0, 0.1, 0.5, 3.0]))
    threshold = data.draw(st.sampled_from([1e-6, 0.04, 0.5]))
    among = data.draw(st.sampled_from(["trust_region", "all"]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    noise, advantages = torch.randn(2, batch.token_count, generator=draw)
    batch = batch.with_tokens(current=batch["logprobs"] + spread * noise, advantages=advantages)
    context = BatchContext(TrainingSection(), {"actor": Engine(lambda batch: batch["current"])})
    mask, difference = batch["loss_mask"], (batch["current"] - batch["logprobs"]).double()
    found = m2po(batch, context, threshold=threshold, among=among)["trusted"]
    expected = trusted_by_index(difference[mask].tolist(), advantages[mask].tolist(), threshold, among)
    assert found[mask].tolist() == expected
    assert not found[~mask].any()
    assert numbers_of(context.metrics)["distrusted_fraction"] == pytest.approx(1 - sum(expected) / len(expected))
    order = data.draw(st.permutations(range(len(batch))))
    again = m2po(batch.select(order), context, threshold=threshold, among=among)["trusted"]
    assert torch.equal(again, batch.with_tokens(trusted=found).select(order)["trusted"])


@pytest.mark.parametrize(
    ("among", "trusted", "moment"),
    [("trust_region", [1, 0, 1, 1, 1, 0], (0.01 + 0.25 + 0.04) / 3), ("all", [1, 0, 0, 1, 1, 0], 0.66 / 5)],
)
def test_m2po_on_two_ragged_answers(among, trusted, moment, make_batch):
    """By hand: log-ratios of a good answer 0.1, 0.5, -0.6, of a bad one -0.2, 0.0; at a threshold of 0.05.

    The update takes 0.1, 0.5 and -0.2 further away: their mean square is 0.1, and 0.025 without 0.5. Of all five
    tokens the mean is 0.132, 0.075 without -0.6 and 0.017 without both.
    """
    batch = make_batch([1.0, 0.0], [0, 0], lengths=[3, 3]).with_tokens(
        loss_mask=torch.tensor([True] * 5 + [False]),
        logprobs=torch.full((6,), -2.0),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    )
    log_ratios = torch.tensor([0.1, 0.5, -0.6, -0.2, 0.0, -9.0])
    context = BatchContext(TrainingSection(), {"actor": Engine(batch["logprobs"] + log_ratios)})
    assert m2po(batch, context, threshold=0.05, among=among)["trusted"].int().tolist() == trusted
    numbers = numbers_of(context.metrics)
    assert numbers["second_moment"] == pytest.approx(moment)
    assert numbers["distrusted_fraction"] == pytest.approx(1 - sum(trusted) / 5)


def test_m2po_leaves_out_equals_together(make_batch):
    batch = make_batch([1.0, 0.0], [0, 0], lengths=[5, 5])
    batch = batch.with_tokens(loss_mask=torch.ones(10, dtype=torch.bool), advantages=torch.ones(10))
    moved = batch["logprobs"] + torch.tensor([0.5] * 4 + [0.0] * 6)
    for among in ("trust_region", "all"):
        context = BatchContext(TrainingSection(), {"actor": Engine(moved)})
        trusted = m2po(batch, context, threshold=0.09, among=among)["trusted"]
        assert trusted.tolist() == [False] * 4 + [True] * 6


def test_m2po_learns_from_what_it_trusts_and_divides_by_all(rollouts):
    """Its loss by index, and each update asks the policy anew."""
    batch, passes = rollouts
    algorithm = build(M2POSettings)
    asked = []

    def answer(batch):
        asked.append(len(batch))
        return passes["actor"]

    context = BatchContext(TrainingSection(num_epochs=2), {"actor": Engine(answer)}, version=4)
    works = [work for (work,) in algorithm.updates(algorithm.prepare(batch, context), context)]
    assert asked == [len(batch)] * 2
    found = passes["actor"].clone().requires_grad_()
    result = algorithm.loss(works[0].batch, {"logprobs": found})
    result.loss.backward()
    mask, advantages = batch["loss_mask"], works[0].batch["advantages"]
    ratio = (passes["actor"] - batch["logprobs"]).exp()
    trusted = works[0].batch["trusted"]
    assert 0 < trusted.sum() < mask.sum()
    assert ((passes["actor"] - batch["logprobs"])[~trusted & mask] * advantages[~trusted & mask] > 0).all()
    expected = torch.where(trusted, -ratio * advantages / mask.sum(), 0.0)
    torch.testing.assert_close(found.grad, expected)


def test_the_entropy_is_led_to_its_target_and_the_state_remembers(rollouts):
    """By hand: below the target the coefficient grows and is used; above it shrinks, never below 0, and is not."""
    batch, passes = rollouts
    algorithm = build(
        GRPOSettings,
        corrections=[],
        minibatch_transforms=[{"type": "grpo/entropy_target", "target": 0.5, "step": 0.1, "maximum": 0.25}],
        regularizers=["grpo/adaptive_entropy"],
    )
    state, spread = {}, torch.rand(batch.token_count, generator=torch.Generator().manual_seed(1)) / 10
    below = [(0.3, 0.1, 0.1), (0.3, 0.2, 0.2), (0.3, 0.25, 0.25)]
    above = [(0.9, 0.15, 0), (0.9, 0.05, 0), (0.9, 0.0, 0)]
    for entropy, kept, used in [*below, *above]:
        answers = torch.where(batch["loss_mask"], entropy + spread, torch.nan)
        context = BatchContext(TrainingSection(), {"actor": Engine(answers)}, state=state)
        ((work, *_),) = algorithm.updates(algorithm.prepare(batch, context), context)
        assert state["entropy_target/coefficient"].item() == pytest.approx(kept)
        assert numbers_of(context.metrics)["entropy_coefficient"] == pytest.approx(used)
        leaf = answers.clone().requires_grad_()
        algorithm.loss(work.batch, {"logprobs": passes["actor"], "entropy": leaf}).loss.backward()
        expected = torch.where(batch["loss_mask"], -used / batch["loss_mask"].sum(), 0.0)
        torch.testing.assert_close(leaf.grad, expected)
