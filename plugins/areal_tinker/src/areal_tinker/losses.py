"""The losses of Tinker: sums over tokens, as tinker-docs.thinkingmachines.ai/tinker/losses defines them.

All tensors are flat, [T], with the tokens of several sequences: log-probabilities p of the target tokens under the
model with gradients, log-probabilities q under the policy that sampled (`logprobs`), advantages A. The ratio is
ρ = exp(p - q). `mask` multiplies the loss of each token; without it, all tokens count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal_tinker.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""Default bounds of the ratio in `ppo`, `cispo` and `gspo`."""
BETA = 0.05
"""Default weight of the quadratic penalty in `dro`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of a loss.

    Attributes:
        logprobs: [T] float32 with gradients, of the target tokens under the model.
        inputs: the tensors of `loss_fn_inputs` by name, [T] float32, without `target_tokens`.
        settings: `loss_fn_config`.
        row_index: [T] int64, the sequence of each token.
        rows: number of sequences.
    """

    logprobs: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    settings: Mapping[str, float]
    row_index: torch.Tensor
    rows: int

    @property
    def log_ratio(self) -> torch.Tensor:
        """Log of the ratio of each token, [T]; 0 outside `mask`, where infinity times 0 would be NaN."""
        difference = self.logprobs - self.inputs["logprobs"]
        return difference.where(self.inputs["mask"] != 0, 0.0) if "mask" in self.inputs else difference

    def clipped(self, ratio: torch.Tensor) -> torch.Tensor:
        """Return the ratio within its bounds, which are numbers of the config or a value for each token."""
        low = self.inputs.get("clip_low_threshold", self.settings.get("clip_low_threshold", CLIP_LOW))
        high = self.inputs.get("clip_high_threshold", self.settings.get("clip_high_threshold", CLIP_HIGH))
        return torch.clamp(ratio, torch.as_tensor(low).to(ratio), torch.as_tensor(high).to(ratio))


def cross_entropy(terms: Terms) -> torch.Tensor:
    """Return -w p of each token, with `weights` w."""
    return -terms.logprobs * terms.inputs["weights"]


def importance_sampling(terms: Terms) -> torch.Tensor:
    """Return -ρ A of each token: REINFORCE, corrected for the policy that sampled."""
    return -terms.log_ratio.exp() * terms.inputs["advantages"]


def ppo(terms: Terms) -> torch.Tensor:
    """Return -min(ρ A, clip(ρ) A) of each token (arXiv 1707.06347)."""
    return _surrogate(terms, terms.log_ratio.exp())


def cispo(terms: Terms) -> torch.Tensor:
    """Return -sg(clip(ρ)) A p of each token (arXiv 2506.13585)."""
    return -terms.clipped(terms.log_ratio.exp()).detach() * terms.inputs["advantages"] * terms.logprobs


def dro(terms: Terms) -> torch.Tensor:
    """Return -(p A - β/2 (log ρ)²) of each token (arXiv 2405.19107)."""
    beta = terms.settings.get("beta", BETA)
    return beta / 2 * terms.log_ratio.square() - terms.logprobs * terms.inputs["advantages"]


def gspo(terms: Terms) -> torch.Tensor:
    """Return -min(s A, clip(s) A) of each token (arXiv 2507.18071, GSPO-token).

    s has the value exp(mean of log ρ over the tokens of the sequence in `sequence_ratio_mask`) and the gradient of the
    token's own log-probability.
    """
    counts = (terms.inputs["sequence_ratio_mask"] != 0).float()
    sums = terms.logprobs.new_zeros(2, terms.rows).index_add(
        1, terms.row_index, torch.stack([terms.log_ratio.detach().where(counts > 0, 0.0), counts])
    )
    mean = (sums[0] / sums[1].clamp(min=1))[terms.row_index]
    return _surrogate(terms, (mean + terms.logprobs - terms.logprobs.detach()).exp())


def _surrogate(terms: Terms, ratio: torch.Tensor) -> torch.Tensor:
    advantages = terms.inputs["advantages"]
    return -torch.minimum(ratio * advantages, terms.clipped(ratio) * advantages)


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss with what it reads.

    Attributes:
        per_token: returns the loss of each token, [T].
        inputs: names in `loss_fn_inputs` that every datum must have beside `target_tokens`.
        optional: further names that it reads.
        settings: names in `loss_fn_config` that it reads.
    """

    per_token: Callable[[Terms], torch.Tensor]
    inputs: frozenset[str]
    optional: frozenset[str] = frozenset({"mask"})
    settings: frozenset[str] = frozenset()

    def check(self, name: str, inputs: frozenset[str], settings: frozenset[str]) -> None:
        """Check the names in a request.

        Raises:
            RequestError: an input is missing, or the loss does not read an input or a setting.
        """
        if missing := sorted(self.inputs - inputs):
            raise RequestError(f"loss_fn_inputs lacks {', '.join(missing)}, which the loss '{name}' needs")
        if unread := sorted(inputs - self.inputs - self.optional):
            raise RequestError(f"the loss '{name}' does not read the loss_fn_inputs {', '.join(unread)}")
        if unread := sorted(settings - self.settings):
            known = f"; it has {', '.join(sorted(self.settings))}" if self.settings else "; it has none"
            raise RequestError(f"the loss '{name}' has no setting {', '.join(unread)} in loss_fn_config{known}")


_POLICY = frozenset({"logprobs", "advantages"})
_BOUNDS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_OPTIONAL = _BOUNDS | {"mask"}
LOSSES = {
    "cross_entropy": LossFunction(cross_entropy, frozenset({"weights"})),
    "importance_sampling": LossFunction(importance_sampling, _POLICY),
    "ppo": LossFunction(ppo, _POLICY, _OPTIONAL, _BOUNDS),
    "cispo": LossFunction(cispo, _POLICY, _OPTIONAL, _BOUNDS),
    "dro": LossFunction(dro, _POLICY, settings=frozenset({"beta"})),
    "gspo": LossFunction(gspo, _POLICY | {"sequence_ratio_mask"}, _OPTIONAL, _BOUNDS),
}
"""The losses that this server computes, by the names of the SDK."""


def find_loss(name: str) -> LossFunction:
    """Return a loss by its name.

    Raises:
        RequestError: this server does not have it.
    """
    if name in LOSSES:
        return LOSSES[name]
    reason = ", whose formula is not published" if name == "stable_reinforce" else ""
    raise RequestError(f"this server has no loss '{name}'{reason}; set loss_fn to one of {', '.join(LOSSES)}")


def total(function: LossFunction, terms: Terms) -> torch.Tensor:
    """Return the sum of the loss over all tokens, []."""
    losses = function.per_token(terms)
    mask = terms.inputs.get("mask")
    return (losses if mask is None else losses * mask).sum()
