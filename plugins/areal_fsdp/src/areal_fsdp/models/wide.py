"""Wide outputs: they need whole distributions, or have several numbers per token that stay on the device.

As in `logprobs`, logits exist for one chunk of tokens at a time, and the backward pass recomputes them. With z = logits
/ temperature, q = softmax(z), and the fixed distribution p of the compared role:

    D = β KL(p ‖ m) + (1 - β) KL(q ‖ m), m = β p + (1 - β) q:   d D / d z_j = (1 - β) q_j (log q_j/m_j - KL(q ‖ m))
    KL(p ‖ q), for β = 0:                                       d D / d z_j = q_j - p_j
    KL(q ‖ p), for β = 1:                                       d D / d z_j = q_j (log q_j/p_j - KL(q ‖ p))
    log q_y of several y:                                       d / d z_j   = [j = y] - q_j, summed over them
    S = Σ_v q_v²:                                               d S / d z_j = 2 q_j (q_j - S)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from areal_core.errors import RunError
from areal_fsdp.models.logprobs import chunks, head_gradients, logits_of, slope_of_cap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.sdk import Role

SQUARES = "sum_pi_squared"
_TOPK = re.compile(r"topk:([1-9]\d*)")
_DIVERGENCE = re.compile(r"divergence:([\w-]+):(\d+(?:\.\d*)?(?:e-\d+)?)")
_LOGITS_AT_ONCE = 3
"""Memory of a divergence, including its gradient, in multiples of the memory of one model's logits."""


@dataclass(frozen=True, slots=True)
class Head:
    """The inputs and weights of a role's head.

    Attributes:
        hidden: [T, hidden size].
        weight: [vocabulary, hidden size].
        bias: [vocabulary] or None.
        temperature: logits are divided by it.
        cap: soft cap of the logits, applied before the temperature; None without one.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    cap: float | None = None

    def first(self, ids: int) -> Head:
        """Return the head of a vocabulary of only the first `ids` tokens."""
        if ids == len(self.weight):
            return self
        return replace(self, weight=self.weight[:ids], bias=None if self.bias is None else self.bias[:ids])

    def log_distribution(self, part: slice) -> torch.Tensor:
        """Return the log softmax of a slice of tokens, [tokens, vocabulary] float32, without gradients."""
        return self.distribution_of(self.logits(part))

    def logits(self, part: slice) -> torch.Tensor:
        """Return logits [tokens, vocabulary] float32, before the temperature."""
        return logits_of(self.hidden[part], self.weight, self.bias, self.cap)

    def distribution_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log softmax of logits over the temperature; overwrite `logits`."""
        return (logits if self.temperature == 1 else logits.div_(self.temperature)).log_softmax(-1)


def is_wide(name: str) -> bool:
    """Return True for the name of a wide output."""
    return name in ("hidden", SQUARES) or topk_of(name) is not None or compared_role(name) is not None


def has_one_number(name: str) -> bool:
    """Return True for the name of an output [T], which `forward` can return."""
    return name != "top_logprobs" and (not is_wide(name) or name == SQUARES or compared_role(name) is not None)


def topk_of(name: str) -> int | None:
    """Return K of the output `topk:K`; None for other outputs."""
    match = _TOPK.fullmatch(name)
    return int(match[1]) if match else None


def compared_role(name: str) -> str | None:
    """Return the role of the output `divergence:ROLE:BETA` with 0 <= BETA <= 1; None for other outputs."""
    match = _DIVERGENCE.fullmatch(name)
    return match[1] if match and float(match[2]) <= 1 else None


def compared_roles(names: Iterable[str]) -> list[str]:
    """Return the roles that these outputs compare with, without duplicates."""
    return list(dict.fromkeys(role for name in names if (role := compared_role(name)) is not None))


def check_outputs(names: Iterable[str], role: Role, vocabulary: int, *, narrow: bool = False) -> None:
    """Raise RunError for an output that a role does not compute.

    Args:
        names: names of the outputs.
        role: the engine's role.
        vocabulary: number of tokens of the vocabulary, the upper bound of K in `topk:K`.
        narrow: True to refuse outputs with more than one number per token.
    """
    is_scalar = role.head == "scalar"
    known = ["values"] if is_scalar else ["logprobs", "entropy", "top_logprobs"]
    wide = ["hidden"] if is_scalar else [SQUARES, "hidden", "topk:K", "divergence:ROLE:BETA"]
    for name in names:
        if name not in known and not (is_wide(name) and (name == "hidden" or not is_scalar)):
            raise RunError(f"an engine in the role '{role.name}' computes {', '.join(known + wide)}, not '{name}'")
        if (topk_of(name) or 0) > vocabulary:
            raise RunError(f"'{name}' asks for more tokens than the {vocabulary} of the vocabulary")
        if narrow and not has_one_number(name):
            raise RunError(f"'{name}' has more than one number per token: only a loss in `train` may request it")


def wide_output(name: str, own: Head, others: Mapping[str, Head], chunk_tokens: int) -> dict[str, torch.Tensor]:
    """Compute one wide output, with gradients unless these are disabled.

    Args:
        name: `sum_pi_squared`, `hidden`, `topk:K` or `divergence:ROLE:BETA`; see `TrainEngine`.
        own: the model's head.
        others: heads of the compared roles, by role; they get no gradient.
        chunk_tokens: tokens whose log-probabilities may exist at the same time.

    Returns:
        Tensors by name: `sum_pi_squared` [T] float32; `hidden` [T, hidden size]; `topk:K` [T, K] float32 and
        `topk:K:ids` [T, K] int64; a divergence [T] float32, in nats.
    """
    if name == "hidden":
        return {name: own.hidden.clone()}  # FSDP puts hooks on the output of a module, which must not be a view
    if name == SQUARES:
        return {name: _reduced(own, SumOfSquares(), chunk_tokens)}
    if (count := topk_of(name)) is not None:
        topk = TopK(count)
        values = _reduced(own, topk, chunk_tokens)
        return {name: values, f"{name}:ids": torch.cat([topk.ids[start] for start in sorted(topk.ids)])}
    match = _DIVERGENCE.fullmatch(name)
    assert match is not None
    # Models of one family pad their vocabularies to different lengths: compare only the ids that both have.
    shared = min(len(own.weight), len(others[match[1]].weight))
    compared = Divergence(others[match[1]].first(shared), float(match[2]))
    return {name: _reduced(own.first(shared), compared, max(1, chunk_tokens // _LOGITS_AT_ONCE))}


class Reduction(Protocol):
    """A function of a chunk's log-distributions [tokens, vocabulary]; both methods may overwrite these."""

    def values(self, log_q: torch.Tensor, part: slice) -> torch.Tensor:
        """Return [tokens] or [tokens, K] float32."""

    def gradient(self, log_q: torch.Tensor, part: slice, upstream: torch.Tensor) -> torch.Tensor:
        """Return the gradient of logits / temperature, [tokens, vocabulary], from the gradient of the values."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The generalized Jensen-Shannon divergence from another role, in nats (GKD, arXiv 2306.13649, equation 1)."""

    other: Head
    beta: float

    def values(self, log_q: torch.Tensor, part: slice) -> torch.Tensor:
        """See `Reduction`."""
        log_p, beta = self.other.log_distribution(part), self.beta
        if beta == 0:
            return _kl(log_p, log_q)
        if beta == 1:
            return _kl(log_q, log_p)
        log_m = self._mixed(log_p, log_q)
        return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)

    def gradient(self, log_q: torch.Tensor, part: slice, upstream: torch.Tensor) -> torch.Tensor:
        """See `Reduction`."""
        log_p, beta = self.other.log_distribution(part), self.beta
        if beta == 0:
            return (log_q.exp() - log_p.exp()).mul_(upstream[:, None])
        log_m = log_p if beta == 1 else self._mixed(log_p, log_q)
        distance = torch.where(log_q.isneginf(), 0.0, log_q - log_m)
        q = log_q.exp()
        mean = (q * distance).sum(-1, keepdim=True)
        return distance.sub_(mean).mul_(q).mul_((1.0 if beta == 1 else 1 - beta) * upstream[:, None])

    def _mixed(self, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))


@dataclass(slots=True)
class TopK:
    """The log-probabilities of the likeliest tokens, in descending order.

    Attributes:
        count: K.
        ids: ids [tokens, K] of the tokens, by the start of the chunk.
    """

    count: int
    ids: dict[int, torch.Tensor] = field(default_factory=dict)

    def values(self, log_q: torch.Tensor, part: slice) -> torch.Tensor:
        """See `Reduction`."""
        values, self.ids[part.start] = log_q.topk(self.count)
        return values

    def gradient(self, log_q: torch.Tensor, part: slice, upstream: torch.Tensor) -> torch.Tensor:
        """See `Reduction`."""
        return log_q.exp_().mul_(-upstream.sum(-1, keepdim=True)).scatter_add_(1, self.ids[part.start], upstream)


class SumOfSquares:
    """Σ_v q_v²: the probability that two draws from the distribution are the same token."""

    def values(self, log_q: torch.Tensor, part: slice) -> torch.Tensor:
        """See `Reduction`."""
        return log_q.mul_(2).exp_().sum(-1)

    def gradient(self, log_q: torch.Tensor, part: slice, upstream: torch.Tensor) -> torch.Tensor:
        """See `Reduction`."""
        q = log_q.exp_()
        total = q.square().sum(-1, keepdim=True)
        return q.mul_(q - total).mul_(2 * upstream[:, None])


def _kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Return KL(of ‖ to) from log-distributions; a token with probability 0 in `of` contributes 0."""
    return torch.where(of.isneginf(), 0.0, of.exp() * (of - to)).sum(-1)


def _reduced(own: Head, reduction: Reduction, chunk_tokens: int) -> torch.Tensor:
    values: torch.Tensor = _Reduce.apply(  # type: ignore[no-untyped-call]
        own.hidden, own.weight, own.bias, own.temperature, own.cap, reduction, chunk_tokens
    )
    return values


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        temperature: float,
        cap: float | None,
        reduction: Reduction,
        chunk: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.temperature, ctx.cap, ctx.reduction, ctx.chunk = temperature, cap, reduction, chunk
        own = Head(hidden, weight, bias, temperature, cap)
        parts = chunks(len(hidden), chunk)
        return torch.cat([reduction.values(own.log_distribution(part), part) for part in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        own = Head(hidden, weight, bias, ctx.temperature, ctx.cap)

        def gradient(part: slice) -> torch.Tensor:
            logits = own.logits(part)
            slope = None if own.cap is None else slope_of_cap(logits, own.cap)
            of_logits = ctx.reduction.gradient(own.distribution_of(logits), part, upstream[part])
            of_logits = of_logits.div_(ctx.temperature)
            scaled: torch.Tensor = (of_logits if slope is None else of_logits.mul_(slope)).to(hidden.dtype)
            return scaled

        gradients = head_gradients(hidden, weight, bias, ctx.chunk, gradient, ctx.needs_input_grad)
        return *gradients, None, None, None, None
