"""Policy gradients composed of transforms, an advantage, corrections, a loss, regularizers and a loss aggregation.

The order of things for one batch: `prepare` runs forward passes and transforms and computes advantages on all of it;
`updates` cuts it into minibatches, fixes every token's weight in the update's loss, and hands out the work; `loss` is
called for each micro-batch and only adds up.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from areal_core.algorithms.passes import run_passes
from areal_core.config import selections
from areal_core.config.needs import needs_of
from areal_core.data.metrics import Metric
from areal_core.errors import RunError
from areal_core.interfaces.algorithm import LossResult, LossSpec, PolicyTerms
from areal_core.interfaces.model import ACTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from areal_core.algorithms.settings import PolicyGradientSettings
    from areal_core.config import Selection
    from areal_core.data.batch import PackedBatch
    from areal_core.data.trajectory import Episode
    from areal_core.interfaces.algorithm import Context, GroupFilter, RewardShaping

OUTPUTS = ("logprobs", "entropy")
LARGEST_LOG_RATIO = 20.0
"""Beyond it the exponential of a log-ratio says nothing but that the two policies have nothing in common."""


class PolicyGradient:
    """An `Algorithm` from components; see `PolicyGradientSettings` for what each is."""

    encode = None

    def __init__(self, settings: PolicyGradientSettings) -> None:
        self._settings = settings
        shaping = [_keeps_groups(one.target, one.build()) for one in settings.reward_shaping]
        self.group_filters = [*shaping, *(one.build() for one in settings.group_filters)]
        self._batch_transforms = [one.build() for one in settings.batch_transforms]
        self._advantage = settings.advantage.build()
        self._minibatch_transforms = [one.build() for one in settings.minibatch_transforms]
        self._corrections = [_checking_weights(correction) for correction in settings.corrections]
        self._policy_loss = _checking(settings.policy_loss)
        self._regularizers = [_checking(regularizer) for regularizer in settings.regularizers]
        self._auxiliary_losses = [auxiliary_loss.build() for auxiliary_loss in settings.auxiliary_losses]
        self._loss_aggregation = settings.loss_aggregation.build()
        needs_tops = any(chosen.declared("needs_top_logprobs") for _, chosen in selections(settings))
        self._outputs = (*OUTPUTS, "top_logprobs") if needs_tops else OUTPUTS

    def prepare(self, batch: PackedBatch, context: Context) -> PackedBatch:
        """See `Algorithm.prepare`."""
        batch = run_passes(batch, needs_of(self._settings, context.updates), context)
        for transform in self._batch_transforms:
            batch = batch.with_columns(transform(batch, context))
        found = self._advantage(batch)
        columns = dict(found) if isinstance(found, Mapping) else {"advantages": found}
        given = columns.get("advantages")
        columns["advantages"] = _checked(self._settings.advantage, given, batch.token_count, len(batch))
        if len(columns["advantages"]) == len(batch):
            columns["advantages"] = columns["advantages"][batch.tokens.row_index]
        self._watch(columns["advantages"], batch["loss_mask"], context)
        if self._settings.proximal != "recomputed":
            columns["proximal_share"] = self._proximal_share(batch, context)
        return batch.with_columns(columns)

    def _watch(self, advantages: torch.Tensor, mask: torch.Tensor, context: Context) -> None:
        """Log how large advantages are; those that are no numbers would turn every parameter into none."""
        if wrong := int((~advantages.isfinite() & mask).sum()):
            raise RunError(
                f"the advantage '{self._settings.advantage.target}' gave {wrong} values that are NaN or infinite, of "
                f"{int(mask.sum())} tokens (step {context.step})",
                hints=["check groups whose rewards are all equal: divisions by 0 hide there"],
            )
        size = advantages.abs()
        metrics = {
            "advantage_mean": Metric.mean(advantages, mask),
            "advantage_magnitude": Metric.mean(size, mask),
            "advantage_largest": Metric.maximum(size.where(mask, 0.0)),
        }
        for name, metric in metrics.items():
            context.log(name, metric)

    def updates(self, batch: PackedBatch, context: Context) -> Iterator[Sequence[LossSpec]]:
        """See `Algorithm.updates`."""
        for cut in context.minibatches(batch):
            minibatch = cut
            for transform in self._minibatch_transforms:
                minibatch = minibatch.with_columns(transform(minibatch, context))
            weights = _checked(
                self._settings.loss_aggregation, self._loss_aggregation(minibatch), minibatch.token_count
            )
            minibatch = minibatch.with_tokens(loss_weights=weights)
            works = [auxiliary_loss(minibatch, context) for auxiliary_loss in self._auxiliary_losses]
            if context.step >= self._settings.warmup_steps:
                works.insert(0, LossSpec(ACTOR.name, minibatch, self._outputs, self.loss))
            yield works

    def loss(self, batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
        """Σ w_t c_t (m_t L_t + R_t): w from the loss aggregation, m and c the masks and weights of the corrections, R
        the regularizers."""
        terms = self._terms(batch, outputs)
        losses, logged = self._policy_loss(terms)
        kept = terms.mask if (trusted := batch.get("trusted")) is None else terms.mask & trusted
        weights = torch.ones_like(losses)
        for correction in self._corrections:
            given, also = correction(terms)
            kept, logged = kept & given.bool(), logged | also
            weights = weights * torch.where(given.bool(), given, 1.0)
        # Where a mask is off a value may be anything, infinite included: select, do not multiply.
        losses = torch.where(kept, losses, 0.0)
        for regularizer in self._regularizers:
            added, also = regularizer(terms)
            losses, logged = losses + added, logged | also
        losses = torch.where(terms.mask, losses * weights, 0.0)
        if terms.logprobs.requires_grad and not losses.requires_grad:
            raise RunError("nothing in the loss depends on the model, so nothing is learned", hints=["a detach()?"])
        tokens = dict(
            logged,
            proximal_logprobs=terms.proximal_logprobs,
            loss=losses,
            loss_weights=batch["loss_weights"],
            correction_weights=torch.where(kept, weights, 0.0),
        )
        if "proximal_share" in batch:  # how far a policy is that was made from the sampling one says nothing
            terms = replace(terms, proximal_logprobs=terms.logprobs.detach())
        metrics = {name: Metric.mean(value, terms.mask) for name, value in (logged | _mismatch(terms)).items()}
        metrics |= {"effective_sample_share": Metric.effective_share(_behavior_weight(terms), terms.mask)}
        return LossResult((losses * batch["loss_weights"]).sum(), metrics, tokens)

    def _proximal_share(self, batch: PackedBatch, context: Context) -> torch.Tensor:
        """[T]: how far the proximal policy is on the way from the behavior policy to the current one."""
        if self._settings.proximal == "behavior":
            return torch.zeros(batch.token_count)
        gap = (context.version - batch["versions"]).clamp(min=0).float()
        return torch.where(batch["versions"] >= 0, gap / (gap + 1), 0.0)

    @staticmethod
    def _terms(batch: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> PolicyTerms:
        logprobs, behavior = outputs["logprobs"], batch["logprobs"]
        # First the choice of the settings; a batch transform may have asked for the column below.
        if "proximal_share" in batch:
            proximal = behavior + batch["proximal_share"] * (logprobs.detach() - behavior)
        elif "proximal_logprobs" in batch:
            proximal = batch["proximal_logprobs"]
        else:
            proximal = logprobs.detach()
        return PolicyTerms(
            logprobs=logprobs,
            proximal_logprobs=proximal,
            behavior_logprobs=behavior,
            advantages=batch["advantages"],
            mask=batch["loss_mask"],
            row_index=batch.tokens.row_index,
            rows=len(batch),
            entropy=outputs.get("entropy"),
            top_logprobs=outputs.get("top_logprobs"),
            behavior_top_logprobs=batch.get("top_logprobs"),
            columns=batch.tokens.values,
        )


def _checking(chosen: Selection) -> Callable[[PolicyTerms], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """A loss, a regularizer or a correction, built; what it gives is a value of each token, and what is logged."""
    component: Any = chosen.build()

    def checked(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = component(terms)
        if not isinstance(found, tuple) or len(found) != 2:
            raise RunError(f"the {chosen.title} gave no pair of a tensor and what is logged")
        for values in (found[0], *found[1].values()):
            _checked(chosen, values, len(terms.mask))
        return found

    return checked


def _checking_weights(chosen: Selection) -> Callable[[PolicyTerms], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return a correction that checks its weights: a gradient through them would be a second loss."""
    checking = _checking(chosen)

    def checked(terms: PolicyTerms) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights, logged = checking(terms)
        if weights.requires_grad:
            raise RunError(f"the {chosen.title} gave weights with a gradient", hints=["return weights.detach()"])
        if weights.dtype != torch.bool and not weights.is_floating_point():
            raise RunError(f"the {chosen.title} gave {weights.dtype}, and must give bool for a mask or float weights")
        return weights, logged

    return checked


def _checked(chosen: Selection, found: Any, tokens: int, sequences: int | None = None) -> torch.Tensor:
    """What a component gave, one value for each token, or each sequence; `RunError` names it, and both shapes."""
    if isinstance(found, torch.Tensor) and found.ndim == 1 and len(found) in (tokens, sequences):
        return found
    got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"{found!r:.60}"
    other = "" if sequences is None else f"({sequences},), one value for each sequence or "
    raise RunError(f"the {chosen.title} gave {got}, and must give {other}({tokens},), one value for each token")


def _behavior_weight(terms: PolicyTerms) -> torch.Tensor:
    """[T]: proximal over behavior probability, 1 outside of the mask."""
    difference = torch.where(terms.mask, terms.proximal_logprobs - terms.behavior_logprobs, 0.0)
    return difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _mismatch(terms: PolicyTerms) -> dict[str, torch.Tensor]:
    """How far the sampling policy is from the one that learns; logged whatever corrects for it, and where nothing does.

    Of KL(behavior ‖ proximal), from tokens that the former has sampled: k1 is the mean log-ratio, k3 a lower-variance
    estimate that is never negative (Schulman, "Approximating KL divergence", 2020). The last two are the shares that
    usual corrections would bound: of tokens with a ratio above 2, and of tokens in sequences of which the geometric
    mean of the ratios is out of 0.99 to 1.01.
    """
    difference = torch.where(terms.mask, terms.behavior_logprobs - terms.proximal_logprobs, 0.0)
    weight = _behavior_weight(terms)
    mean = (-terms.row_mean(difference)).exp()[terms.row_index]
    logged = {
        "behavior_kl_k1": difference,
        "behavior_kl": weight - 1 + difference,
        "behavior_difference": difference.abs(),
        "behavior_above_two": (weight > 2).float(),
        "behavior_mean_off": ((mean < 0.99) | (mean > 1.01)).float(),
        "logprob": terms.logprobs,
    }
    if terms.entropy is not None:
        logged["entropy"] = terms.entropy
    return logged


def _keeps_groups(name: str, shaping: RewardShaping) -> GroupFilter:
    """Reward shaping among the filters: one that forgets to return the episodes would drop every group in silence."""

    async def shape(episodes: Sequence[Episode]) -> Sequence[Episode]:
        found: Any = shaping(episodes)
        if inspect.isawaitable(found):
            found = await found
        if not isinstance(found, Sequence):
            raise ValueError(f"the reward shaping '{name}' returned {found!r:.60}; it must return the episodes")
        return found

    shape.__name__ = name
    return shape
