"""Score centering against its definition, differentiated by autograd over the whole vocabulary."""

import math
from dataclasses import replace

import pytest
import torch
from composed import build, prepared

from areal_core.errors import ConfigError
from areal_core.sdk import PolicyTerms
from areal_grpo.config import GRPOSettings
from areal_grpo.score_centering import score_centering

TOKENS, VOCABULARY = 40, 50


class Case:
    """Logits of a policy, the distribution that sampled, its K likeliest tokens, sampled tokens and advantages."""

    def __init__(self, count, distance=0.5, dtype=torch.float64):
        draw = torch.Generator().manual_seed(count)

        def noise(*shape):
            return torch.randn(*shape, generator=draw, dtype=dtype)

        self.logits = (2 * noise(TOKENS, VOCABULARY)).requires_grad_()
        self.sampler = (self.logits.detach() + distance * noise(TOKENS, VOCABULARY)).log_softmax(-1)
        self.tokens = torch.multinomial(self.sampler.exp(), 1, generator=draw)[:, 0]
        self.advantages = noise(TOKENS)
        self.mask = torch.arange(TOKENS) % 5 > 0
        self.top, self.top_ids = self.sampler.topk(count)

    def terms(self):
        """What a train engine and a batch give."""
        table = self.logits.log_softmax(-1)
        logprobs = table.gather(1, self.tokens[:, None])[:, 0]
        behavior = self.sampler.gather(1, self.tokens[:, None])[:, 0]
        return PolicyTerms(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),
            behavior_logprobs=behavior,
            advantages=self.advantages,
            mask=self.mask,
            row_index=torch.zeros(TOKENS, dtype=torch.int64),
            rows=1,
            top_logprobs=table.gather(1, self.top_ids),
            behavior_top_logprobs=self.top,
        )

    def gradient(self, losses):
        (found,) = torch.autograd.grad(losses[self.mask].sum(), self.logits, retain_graph=True)
        return found

    def expected(self, cap):
        """-A (w_y ∇log π(y) - Σ_v q(v) w(v) ∇log π(v)), q over the whole vocabulary with a tail proportional to π."""
        table = self.logits.log_softmax(-1)
        policy = table.detach().exp()
        is_head = torch.zeros_like(policy, dtype=torch.bool).scatter(1, self.top_ids, True)
        left = (1 - self.top.exp().sum(-1)) / policy.masked_fill(is_head, 0.0).sum(-1).clamp(min=1e-12)
        q = torch.where(is_head, self.sampler.exp(), left[:, None] * policy)
        torch.testing.assert_close(q.sum(-1), torch.ones(TOKENS, dtype=q.dtype))
        weights = torch.ones_like(q) if cap is None else (policy / q).clamp(max=cap)
        mean = (q * weights * table).sum(-1)
        index = self.tokens[:, None]
        own = policy.gather(1, index) / self.sampler.gather(1, index).exp()
        own = torch.ones_like(own) if cap is None else own.clamp(max=cap)
        return self.gradient(-self.advantages * ((own * table.gather(1, index))[:, 0] - mean))


@pytest.mark.parametrize("count", [1, 4, 20, 49, VOCABULARY])
@pytest.mark.parametrize("cap", [None, 2.0, 1.1])
def test_the_gradient_is_that_of_the_definition(count, cap):
    case = Case(count)
    losses, logged = score_centering(case.terms(), cap=cap)
    torch.testing.assert_close(case.gradient(losses), case.expected(cap), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(logged["top_mass"][case.mask], case.top.exp().sum(-1)[case.mask])


@pytest.mark.parametrize("count", [4, VOCABULARY])
def test_in_float32_it_is_that_to_1e_6(count):
    exact, case = Case(count), Case(count)
    terms = case.terms()
    names = ("logprobs", "behavior_logprobs", "advantages", "top_logprobs", "behavior_top_logprobs")
    losses, _ = score_centering(replace(terms, **{name: getattr(terms, name).float() for name in names}), cap=2.0)
    found = case.gradient(losses)
    torch.testing.assert_close(found, exact.expected(2.0), atol=1e-6 * VOCABULARY, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_update_has_no_drift(cap):
    """With one advantage for all tokens, the expectation of the gradient under the sampler is 0; REINFORCE's is not."""
    case = Case(VOCABULARY)
    total, plain = torch.zeros_like(case.logits), torch.zeros_like(case.logits)
    case.advantages = torch.ones_like(case.advantages)
    for token in range(VOCABULARY):
        case.tokens = torch.full_like(case.tokens, token)
        chances = case.sampler[:, token].exp()
        terms = case.terms()
        losses, _ = score_centering(terms, cap=cap)
        total += case.gradient(losses * chances)
        plain += case.gradient(-terms.logprobs * chances)
    assert plain.abs().max() > 0.1
    assert total.abs().max() < 1e-12


def test_on_policy_the_expectation_is_that_of_reinforce():
    """Where both policies are one, nothing is subtracted from the gradient."""
    case = Case(4, distance=0.0)
    losses, _ = score_centering(case.terms(), cap=None)
    torch.testing.assert_close(case.gradient(losses), case.gradient(-case.advantages * case.terms().logprobs))


@pytest.mark.parametrize("lowest", [-math.inf, -9999.0, torch.finfo(torch.float32).min])
def test_a_sampler_that_cuts_its_distribution_off_has_no_tail(lowest):
    """Servers report such a token with the lowest number that they write."""
    case = Case(3)
    kept = case.sampler.topk(2)
    case.top = torch.cat([kept.values.log_softmax(-1), torch.full((TOKENS, 1), lowest, dtype=torch.float64)], 1)
    for cap in (None, 2.0):
        losses, logged = score_centering(case.terms(), cap=cap)
        assert bool(case.gradient(losses).isfinite().all())
        torch.testing.assert_close(logged["top_mass"][case.mask], torch.ones(int(case.mask.sum()), dtype=torch.float64))


def test_the_algorithm_asks_for_the_likeliest_tokens_and_averages_over_all_tokens(rollouts):
    batch, passes = rollouts
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(batch.token_count, 5, generator=generator).log_softmax(-1)
    shape = {"top_ids": torch.zeros(batch.token_count, 4, dtype=torch.int32), "top_logprobs": heads[:, :4]}
    algorithm = build(GRPOSettings, policy_loss="grpo/score_centering", corrections=[])
    assert algorithm._outputs == ("logprobs", "entropy", "top_logprobs")
    assert build(GRPOSettings)._outputs == ("logprobs", "entropy")
    work = prepared(algorithm, batch.with_tokens(**shape), {})
    ours, tops = passes["actor"].clone().requires_grad_(), (heads[:, :4] + 0.1).clone().requires_grad_()
    algorithm.loss(work, {"logprobs": ours, "top_logprobs": tops}).loss.backward()
    mask = batch["loss_mask"]
    share = work["advantages"] / mask.sum() * mask
    torch.testing.assert_close(ours.grad, -share)
    q, p = heads[:, :4].double().exp(), (heads[:, :4] + 0.1).double().exp()
    left = (1 - q.sum(-1)) / (1 - p.sum(-1)).clamp(min=1e-6)
    wanted = share[:, None] * (q - left[:, None] * p)
    torch.testing.assert_close(tops.grad, wanted.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "sampling.top_logprobs: is 0, and 'grpo/score_centering' needs"),
        (["sampling.top_logprobs=4"], "train_engine: .*Engine does not compute the output 'top_logprobs'"),
        (
            ["sampling.top_logprobs=4", "train_engine=fsdp", "algorithm.corrections=[token_truncate]"],
            "weigh by it twice",
        ),
    ],
)
def test_a_config_that_lacks_what_it_needs_is_refused(read, words, message):
    with pytest.raises(ConfigError, match=message):
        read("algorithm.policy_loss=score_centering", "algorithm.corrections=[]", *words)


def test_a_config_with_all_of_it(read):
    config = read(
        "algorithm.policy_loss=score_centering",
        "algorithm.corrections=[geometric_mask]",
        "sampling.top_logprobs=4",
        "train_engine=fsdp",
    )
    assert config.reader_of_top_logprobs() == "grpo/score_centering"
    assert not [note for note in config.cross_notes() if "top_logprobs" in note]
    unread = read("sampling.top_logprobs=4")
    assert [note for note in unread.cross_notes() if "top_logprobs" in note]
