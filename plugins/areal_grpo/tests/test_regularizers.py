"""Penalties towards a reference: values and the gradients that they have in expectation."""

import pytest
import torch
from pydantic import ValidationError

from areal_core.sdk import PolicyTerms
from areal_grpo.loss_settings import ReferenceKLSettings
from areal_grpo.regularizers import reference_kl


def kl(policy, reference, estimator):
    """The estimate of each token on policy, without a coefficient."""
    mask = torch.ones(len(policy), dtype=torch.bool)
    nothing = torch.zeros(len(policy))
    terms = PolicyTerms(
        policy, policy.detach(), nothing, nothing, mask, nothing.long(), 1, columns={"reference_logprobs": reference}
    )
    return reference_kl(terms, coefficient=1.0, estimator=estimator)[0]


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_kl_estimators(estimator):
    """k3 is unbiased: its mean over all tokens, weighted by the policy, is the divergence itself."""
    policy, reference = (torch.randn(2, 200, generator=torch.Generator().manual_seed(5)) * 0.2).log_softmax(-1).double()
    divergence = (policy.exp() * (policy - reference)).sum()
    found = (policy.exp() * kl(policy, reference, estimator)).sum()
    assert found.item() == pytest.approx(divergence.item(), rel=0.05 if estimator == "k2" else 1e-6)
    difference = policy - reference
    by_hand = {"k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
    torch.testing.assert_close(kl(policy, reference, estimator), by_hand.get(estimator, by_hand["k3"]))
    assert (kl(policy, reference, estimator) >= 0).all()


def test_the_expected_gradient_of_each_kl_estimator():
    """What the documentation says, over all tokens: tokens are drawn from the policy, and the draw has no gradient."""
    logits, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(6)).double()
    reference = other.log_softmax(-1)

    def gradient(value):
        leaf = logits.clone().requires_grad_()
        value(leaf.log_softmax(-1)).backward()
        return leaf.grad

    def expected(estimate):
        return gradient(lambda policy: (policy.detach().exp() * estimate(policy)).sum())

    forward = gradient(lambda policy: (policy.exp() * (policy - reference)).sum())
    backward = gradient(lambda policy: (reference.exp() * (reference - policy)).sum())
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "k2")), forward)
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "unbiased")), forward)
    torch.testing.assert_close(expected(lambda policy: kl(policy, reference, "k3")), backward)
    torch.testing.assert_close(expected(lambda policy: policy - reference), torch.zeros(50).double())
    assert not torch.allclose(forward, backward, atol=1e-3)


def test_the_estimator_without_a_gradient_is_refused_with_the_reason():
    with pytest.raises(ValidationError, match=r"k1 .* has a gradient of 0 in expectation.*choose k2"):
        ReferenceKLSettings(coefficient=0.1, estimator="k1")
