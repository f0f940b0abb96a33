"""What policy losses, regularizers and corrections must do: pure functions of whole sequences."""

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
    """What everything has that is given terms."""

    def terms(self, *, seed: int = 0, distance: float = 0.3) -> PolicyTerms:
        """See `make_terms`; with the columns that the component needs."""
        return make_terms(self.needs(), seed=seed, distance=distance)


class _LossSuite(_TermsSuite):
    """What everything must do that gives a loss for each token."""

    tolerance = 1e-5

    def test_one_loss_for_each_token(self) -> None:
        """[T] float32 with gradients for the current policy, finite also far off policy; metrics are [T] too."""
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
        """A sequence's losses are the same whatever other sequences the micro-batch holds."""
        terms = self.terms()
        whole, _ = self.make()(terms)
        for split in SPLITS:
            for rows in split:
                part, places = select_terms(terms, rows)
                losses, _ = self.make()(part)
                same(losses, whole[places], self.tolerance, f"losses depend on the micro-batch (rows {rows})")

    def test_tokens_out_of_the_mask_do_not_matter(self) -> None:
        """Whatever they hold, the losses and gradients of the others stay as they are."""
        terms = self.terms()
        spoiled = with_garbage(terms)
        for found, wanted in zip(self._in_mask(spoiled), self._in_mask(terms), strict=True):
            same(found, wanted, self.tolerance, "tokens that the policy did not sample influence others")

    def _in_mask(self, terms: PolicyTerms) -> tuple[torch.Tensor, torch.Tensor]:
        losses, _ = self.make()(terms)
        return losses[terms.mask], self._gradient(terms, losses)[terms.mask]

    @staticmethod
    def _gradient(terms: PolicyTerms, losses: torch.Tensor) -> torch.Tensor:
        """For the log-probability of every token; there must be one."""
        (gradient,) = torch.autograd.grad(losses[terms.mask].sum(), terms.logprobs, allow_unused=True)
        assert gradient is not None, "the loss has no gradient for the current policy"
        return gradient


class PolicyLossSuite(_LossSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        is_policy_gradient: whether the gradient on policy is that of REINFORCE, as of every loss whose only purpose is
            to bound or to reweight it; a loss with terms of its own sets False.
        tolerance: of every comparison.
    """

    kind: ClassVar[str] = "policy_losses"
    is_policy_gradient = True

    def test_the_gradient_on_policy_is_the_policy_gradient(self) -> None:
        """-A for every token, summed over each sequence: nothing else flows, and not through the advantage."""
        if not self.is_policy_gradient:
            return
        terms = self.terms(distance=0.0)
        losses, _ = self.make()(terms)
        found, wanted = terms.row_sum(self._gradient(terms, losses)), terms.row_sum(-terms.advantages)
        same(found, wanted, 1e-4, "on policy the gradient of a sequence is not that of REINFORCE")

    def test_the_sign(self) -> None:
        """A step against the gradient makes tokens with a positive advantage more probable."""
        terms = self.terms(distance=0.0)
        terms = replace(terms, advantages=torch.ones_like(terms.advantages))
        losses, _ = self.make()(terms)
        gradient = self._gradient(terms, losses)
        assert float(terms.row_sum(gradient).sum()) < 0, "a positive advantage makes a token less probable"


class RegularizerSuite(_LossSuite):
    """Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "regularizers"

    def test_it_does_not_know_the_advantage(self) -> None:
        """A penalty or a bonus is the same whatever the answers have earned; what depends on it is a policy loss."""
        terms = self.terms()
        losses, _ = self.make()(terms)
        other, _ = self.make()(replace(terms, advantages=-3 * terms.advantages))
        same(other[terms.mask], losses[terms.mask], 0.0, "other advantages change the term")

    @staticmethod
    def _gradient(terms: PolicyTerms, losses: torch.Tensor) -> torch.Tensor:
        """For the log-probability or the entropy of every token; there must be one."""
        assert losses.requires_grad, "the term has no gradient for the current policy"
        asked = [value for value in (terms.logprobs, terms.entropy) if value is not None]
        found = torch.autograd.grad(losses[terms.mask].sum(), asked, allow_unused=True)
        gradients = [value for value in found if value is not None]
        assert gradients, "the term has no gradient for the current policy"
        return torch.stack(gradients).sum(0)


class CorrectionSuite(_TermsSuite):
    """Set `component` (and `settings`), or override `make`."""

    kind: ClassVar[str] = "corrections"
    tolerance = 1e-5

    def test_one_weight_for_each_token(self) -> None:
        """[T] bool where the settings declare a mask, else float32 without gradients, finite and not negative, at any
        distance between the policies."""
        for distance in (0.0, 0.3, 8.0):
            terms = self.terms(distance=distance)
            weights, logged = self.make()(terms)
            assert weights.shape == terms.logprobs.shape, f"shape {tuple(weights.shape)}"
            assert weights.dtype in (torch.bool, torch.float32), f"dtype {weights.dtype}"
            declared = getattr(self.select().settings, "only_masks", None) if self.component else None
            is_mask = weights.dtype == torch.bool
            assert declared in (None, is_mask), f"only_masks is {declared}, and it returns {weights.dtype}"
            assert not weights.requires_grad, "a correction's weights carry gradients"
            inside = weights[terms.mask]
            assert bool((inside.isfinite() & (inside >= 0)).all()), f"weights such as {inside.min()}, {inside.max()}"
            for name, value in logged.items():
                assert value.shape == weights.shape, f"metric '{name}' is not per token"

    def test_nothing_to_correct_on_policy(self) -> None:
        """Every weight is 1 where the policy that sampled is the one that learns."""
        terms = self.terms(distance=0.0)
        weights, _ = self.make()(terms)
        same(weights[terms.mask], torch.ones(int(terms.mask.sum())), self.tolerance, "weights on policy are not 1")

    def test_denominators_stay_as_they_are(self) -> None:
        """Masking or down-weighting one sequence does not raise the weights of the others."""
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
        """A sequence's weights are the same whatever other sequences the micro-batch holds."""
        terms = self.terms()
        whole, _ = self.make()(terms)
        for split in SPLITS:
            for rows in split:
                part, places = select_terms(terms, rows)
                weights, _ = self.make()(part)
                inside = part.mask
                same(
                    weights[inside],
                    whole[places][inside],
                    self.tolerance,
                    f"weights depend on the micro-batch ({rows})",
                )

    def test_tokens_out_of_the_mask_do_not_matter(self) -> None:
        """Whatever they hold, the weights of the others stay as they are."""
        terms = self.terms()
        wanted, _ = self.make()(terms)
        found, _ = self.make()(with_garbage(terms))
        same(found[terms.mask], wanted[terms.mask], self.tolerance, "tokens out of the mask influence weights")
