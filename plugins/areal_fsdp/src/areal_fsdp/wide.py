"""Outputs that need whole distributions, or have more than one number a token; they never leave the device.

As in `logprobs`, logits exist for a chunk of tokens at a time, and the backward pass makes them again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from areal_fsdp.logprobs import add_product, chunks, logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_TOPK = re.compile(r"topk:([1-9]\d*)")
_DIVERGENCE = re.compile(r"divergence:([\w-]+?)(?::([\d.eE+-]+))?")


@dataclass(frozen=True, slots=True)
class Head:
    """What the logits of a role are made from.

    Attributes:
        hidden: [T, hidden size].
        weight: [vocabulary, hidden size].
        bias: [vocabulary] or None.
        temperature: logits are divided by it.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float

    def log_distribution(self, part: slice, vocabulary: int | None = None) -> torch.Tensor:
        """log softmax of some tokens over the first so many ids, or all of them, [tokens, vocabulary] float32."""
        logits: torch.Tensor = _Logits.apply(self.hidden[part], self.weight, self.bias)  # type: ignore[no-untyped-call]
        return logits[:, :vocabulary].div(self.temperature).log_softmax(-1)


def is_wide(name: str) -> bool:
    """Whether this is the name of an output that is computed here."""
    return name == "hidden" or bool(_TOPK.fullmatch(name)) or compared_role(name) is not None


def compared_role(name: str) -> str | None:
    """The role that an output is compared with; None for all outputs but `divergence:ROLE:BETA`, 0 <= BETA <= 1."""
    found = _DIVERGENCE.fullmatch(name)
    return found[1] if found and 0 <= _beta(found) <= 1 else None


def compared_roles(names: Iterable[str]) -> list[str]:
    """The roles that these outputs are compared with, each once."""
    return list(dict.fromkeys(role for name in names if (role := compared_role(name)) is not None))


def wide_output(name: str, own: Head, others: Mapping[str, Head], chunk_tokens: int) -> dict[str, torch.Tensor]:
    """One output, by name, with gradients unless they are off.

    Args:
        name: `hidden`, `topk:K` or `divergence:ROLE:BETA`; see `TrainEngine.train`.
        own: of the model.
        others: of the roles that it is compared with, without gradients.
        chunk_tokens: tokens whose logits exist at once.
    """
    if name == "hidden":
        return {name: own.hidden}
    if found := _TOPK.fullmatch(name):
        count = int(found[1])
        values, ids = _by_chunks(lambda part: _topk(own, part, count), own, chunk_tokens)
        return {"topk_logprobs": values, "topk_ids": ids}
    role = compared_role(name)
    assert role is not None
    beta = _beta(_DIVERGENCE.fullmatch(name))
    (values,) = _by_chunks(lambda part: (divergence(own, others[role], part, beta),), own, chunk_tokens)
    return {name: values}


def divergence(own: Head, other: Head, part: slice, beta: float) -> torch.Tensor:
    """The generalised Jensen-Shannon divergence of some tokens' distributions, in nats; [tokens] float32.

    With P of `other`, Q of `own` and M = β P + (1 - β) Q it is β KL(P ‖ M) + (1 - β) KL(Q ‖ M) (GKD, arXiv 2306.13649,
    equation 1). At its ends, where that is 0, it is KL(P ‖ Q) for β = 0 and KL(Q ‖ P) for β = 1. Models of one family
    pad their vocabularies to different lengths: ids that one of the two lacks are left out of both.
    """
    shared = min(len(own.weight), len(other.weight))
    p, q = other.log_distribution(part, shared), own.log_distribution(part, shared)
    if beta == 0:
        return _kl(p, q)
    if beta == 1:
        return _kl(q, p)
    mixed = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, mixed) + (1 - beta) * _kl(q, mixed)


def _beta(found: re.Match[str] | None) -> float:
    return 1.0 if found is None or found[2] is None else float(found[2])


def _kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """KL(of ‖ to) from log-distributions; a token that `of` never gives counts 0, whatever `to` says."""
    return torch.where(of.isneginf(), 0.0, of.exp() * (of - to)).sum(-1)


def _topk(own: Head, part: slice, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = own.log_distribution(part).topk(count)
    return found.values, found.indices


def _by_chunks(
    compute: Callable[[slice], tuple[torch.Tensor, ...]], own: Head, chunk_tokens: int
) -> Iterator[torch.Tensor]:
    """Each of the tensors that `compute` gives of chunks, put together; what it held in between is computed again."""

    def run(part: slice) -> tuple[torch.Tensor, ...]:
        found: Any = checkpoint(compute, part, use_reentrant=False) if torch.is_grad_enabled() else compute(part)
        return tuple(found)

    parts = chunks(len(own.hidden), chunk_tokens)
    return (torch.cat(list(each)) for each in zip(*map(run, parts), strict=True))


class _Logits(torch.autograd.Function):
    """hidden @ weight.T + bias in float32, whatever the dtype of both; gradients in theirs."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        return logits_of(hidden, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        rounded = of_logits.to(hidden.dtype)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        add_product(of_weight, rounded, hidden)
        of_bias = None if bias is None else of_logits.sum(0).to(bias.dtype)
        return rounded @ weight, of_weight.to(weight.dtype), of_bias
