"""Conformance suites of policy losses, regularizers and corrections, which are functions of whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from areal_testing.conformance.batches import make_terms, select_terms, with_garbage
from areal_testing.conformance.comparisons import same
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from areal_core.sdk import PolicyTerms

SPLITS = ([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], [[11, 3], [0, 7, 5, 1], [2, 4, 6, 8, 9, 10]])


class _TermsSuite(ComponentSuite):
    """The base of suites of components that take policy terms."""

    def terms(self, *, seed: int = 0, distance: float = 0.3) -> PolicyTerms:
        """Return policy terms with the columns that the component needs; see `make_terms`."""
        return make_terms(self.needs(), seed=seed, distance=distance)


class _LossSuite(_TermsSuite):
    """Tests of components that return a loss for each token."""

    tolerance = 1e-5

    def test_one_loss_for_each_token(self) -> None:
        """Losses are [T] float32 with gradients, and finite also far off policy. Metrics are [T]."""
        for distance in (0.0, 0.3, 8.0):
            terms = self.terms(distance=distance)
            losses, logged = self.make()(terms)
            assert losses.shape == terms.logprobs.shape, f"shape {tuple(losses.shape)}"
            assert losses.dtype == torch.float32, f"dtype {losses.dtype}"
            gradient = self._gradient(terms, losses)
            for name, value in {"loss": losses[terms.mask], "gradient": gradient[terms.mask], **logged}.items():
                assert name in {"loss", "gradient"} or value.shape == losses.shape, f"metric '{name}' is not per token"
                assert bool(torch.isfinite(value).all()), f"{name} is not finite at a distance of {distance}"

    def test_a_split_changes_nothing(self) -> None:
        """The losses of a sequence do not depend on the other sequences of its micro-batch."""
        terms = self.terms()
        whole, _ = self.make()(terms)
        for split in SPLITS:
            for rows in split:
                part, indices = select_terms(terms, rows)
                losses, _ = self.make()(part)
                same(losses, whole[indices], self.tolerance, f"losses depend on the micro-batch (rows {rows})")

    def test_tokens_out_of_the_mask_do_not_matter(self) -> None:
        """Values outside the mask do not affect the losses and gradients of other tokens."""
        terms = self.terms()
        spoiled = with_garbage(terms)
        for actual, expected in zip(self._in_mask(spoiled), self._in_mask(terms), strict=True):
            same(actual, expected, self.tolerance, "tokens that the policy did not sample influence others")

    def _in_mask(self, terms: PolicyTerms) -> tuple[torch.Tensor, torch.Tensor]:
        losses, _ = self.make()(terms)
        return losses[terms.mask], self._gradient(terms, losses)[terms.mask]

    @staticmethod
    def _gradient(terms: PolicyTerms, losses: torch.Tensor) -> torch.Tensor:
        """Return the gradient [T] of the losses in the mask with respect to the log-probabilities."""
        (gradient,) = torch.autograd.grad(losses[terms.mask].sum(), terms.logprobs, allow_unused=True)
        assert gradient is not None, "the loss has no gradient for the current policy"
        return gradient


class PolicyLossSuite(_LossSuite):
    """Tests of a policy loss. Set `component` (and `settings`), or override `make`.

    Attributes:
        is_policy_gradient: True if the on-policy gradient is that of REINFORCE, as for each loss that only bounds or
            reweights it. Set False if the loss adds terms.
        tolerance: largest absolute difference in every comparison.
    """

    kind: ClassVar[str] = "policy_losses"
    is_policy_gradient = True

    def test_the_gradient_on_policy_is_the_policy_gradient(self) -> None:
        """The on-policy gradient, summed over each sequence, is -A for each token: none flows through A."""
        if not self.is_policy_gradient:
            return
        terms = self.terms(distance=0.0)
        losses, _ = self.make()(terms)
        actual, expected = terms.row_sum(self._gradient(terms, losses)), terms.row_sum(-terms.advantages)
        same(actual, expected, 1e-4, "on policy the gradient of a sequence is not that of REINFORCE")

    def test_the_sign_is_right(self) -> None:
        """A step against the gradient makes tokens with a positive advantage more probable."""
        terms = self.terms(distance=0.0)
        terms = replace(terms, advantages=torch.ones_like(terms.advantages))
        losses, _ = self.make()(terms)
        gradient = self._gradient(terms, losses)
        assert float(terms.row_sum(gradient).sum()) < 0, "a positive advantage makes a token less probable"


class RegularizerSuite(_LossSuite):
    """Tests of a regularizer. Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "regularizers"

    def test_it_does_not_depend_on_the_advantage(self) -> None:
        """A regularizer is the same for any advantages. A term that depends on them is a policy loss."""
        terms = self.terms()
        losses, _ = self.make()(terms)
        other, _ = self.make()(replace(terms, advantages=-3 * terms.advantages))
        same(other[terms.mask], losses[terms.mask], 0.0, "other advantages change the term")

    @staticmethod
    def _gradient(terms: PolicyTerms, losses: torch.Tensor) -> torch.Tensor:
        """Return the gradient [T] with respect to the log-probabilities and entropies of tokens."""
        assert losses.requires_grad, "the term has no gradient for the current policy"
        inputs = [value for value in (terms.logprobs, terms.entropy) if value is not None]
        found = torch.autograd.grad(losses[terms.mask].sum(), inputs, allow_unused=True)
        gradients = [value for value in found if value is not None]
        assert gradients, "the term has no gradient for the current policy"
        return torch.stack(gradients).sum(0)


class CorrectionSuite(_TermsSuite):
    """Tests of a correction. Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "corrections"
    tolerance = 1e-5

    def test_one_weight_for_each_token(self) -> None:
        """Weights are [T] bool if the settings declare a mask. Otherwise they are float32, finite and not negative.

        They carry no gradients. All of this holds at any distance between the policies.
        """
        for distance in (0.0, 0.3, 8.0):
            terms = self.terms(distance=distance)
            weights, logged = self.make()(terms)
            assert weights.shape == terms.logprobs.shape, f"shape {tuple(weights.shape)}"
            assert weights.dtype in (torch.bool, torch.float32), f"dtype {weights.dtype}"
            declared = getattr(self.select().settings, "only_masks", None) if self.component else None
            is_mask = weights.dtype == torch.bool
            assert declared in (None, is_mask), f"only_masks is {declared}, but the correction returns {weights.dtype}"
            assert not weights.requires_grad, "a correction's weights carry gradients"
            inside = weights[terms.mask]
            assert bool((inside.isfinite() & (inside >= 0)).all()), f"weights such as {inside.min()}, {inside.max()}"
            for name, value in logged.items():
                assert value.shape == weights.shape, f"metric '{name}' is not per token"

    def test_on_policy_weights_are_1(self) -> None:
        """Each weight is 1 if the policy that sampled is the policy that learns."""
        terms = self.terms(distance=0.0)
        weights, _ = self.make()(terms)
        same(weights[terms.mask], torch.ones(int(terms.mask.sum())), self.tolerance, "weights on policy are not 1")

    def test_denominators_stay_as_they_are(self) -> None:
        """The weights of other sequences do not rise if one sequence is masked or gets a lower weight."""
        terms = self.terms()
        before, _ = self.make()(terms)
        far = terms.row_index == 3
        others = ~far & terms.mask
        for shift in (-9.0, 9.0):
            moved = replace(
                terms, behavior_logprobs=torch.where(far, terms.behavior_logprobs + shift, terms.behavior_logprobs)
            )
            after, _ = self.make()(moved)
            same(after[others], before[others], self.tolerance, "a far-off sequence changes the weights of others")

    def test_a_split_changes_nothing(self) -> None:
        """The weights of a sequence do not depend on the other sequences of its micro-batch."""
        terms = self.terms()
        whole, _ = self.make()(terms)
        for split in SPLITS:
            for rows in split:
                part, indices = select_terms(terms, rows)
                weights, _ = self.make()(part)
                inside = part.mask
                same(
                    weights[inside],
                    whole[indices][inside],
                    self.tolerance,
                    f"weights depend on the micro-batch ({rows})",
                )

    def test_tokens_out_of_the_mask_do_not_matter(self) -> None:
        """Values outside the mask do not affect the weights of other tokens."""
        terms = self.terms()
        expected, _ = self.make()(terms)
        actual, _ = self.make()(with_garbage(terms))
        same(actual[terms.mask], expected[terms.mask], self.tolerance, "tokens out of the mask influence weights")
