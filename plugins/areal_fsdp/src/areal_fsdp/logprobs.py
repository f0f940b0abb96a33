"""Log-probabilities and entropy from hidden states, without ever holding the logits of all tokens.

The logits of a chunk of tokens are made, reduced to one or two numbers a token, and thrown away; the backward pass
makes them again. Its formulas, with z = logits / T, p = softmax(z), H = -sum(p log p):

    d log p_y / d z_j = [j = y] - p_j          d H / d z_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL_CHUNK_ELEMENTS = 2**20
"""Logits that a chunk may have in any case: 4 MiB in float32, so that a tiny vocabulary is not cut into many calls."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax((hidden @ weight.T + bias) / temperature) at `targets`, and its entropy.

    Args:
        hidden: [T, hidden size].
        weight: [vocabulary, hidden size], in the dtype of `hidden`.
        bias: [vocabulary] or None.
        targets: [T] int64.
        temperature: above 0.
        chunk_tokens: tokens whose logits exist at once (more where the vocabulary is tiny).
        with_entropy: whether to give the entropy.

    Returns:
        log-probabilities [T] float32 and the entropy in nats, [T] float32, or None.
    """
    chunk = max(chunk_tokens, _SMALL_CHUNK_ELEMENTS // len(weight))
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk, with_entropy
    )
    return logprobs, entropy


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = F.linear(hidden, weight, bias).float()
    return logits if temperature == 1 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = torch.empty_like(normalizer)
        entropy = torch.empty_like(normalizer) if with_entropy else None
        for part in _chunks(len(hidden), chunk):
            logits = _scaled_logits(hidden[part], weight, bias, temperature)
            normalizer[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normalizer[part]
            if entropy is not None:
                logits -= normalizer[part, None]
                entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizer)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _chunks(len(hidden), ctx.chunk):
            log_p = _scaled_logits(hidden[part], weight, bias, ctx.temperature).sub_(normalizer[part, None])
            p = log_p.exp()
            scale = -of_logprobs[part, None]
            if of_entropy is not None:
                scale = log_p.add_(entropy[part, None]).mul_(-of_entropy[part, None]).add_(scale)
            of_logits = p.mul_(scale).scatter_add_(1, targets[part, None], of_logprobs[part, None])
            of_logits = of_logits.div_(ctx.temperature)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            of_logits = of_logits.to(hidden.dtype)
            torch.mm(of_logits, weight, out=of_hidden[part])
            if hidden.dtype == torch.float32:
                of_weight.addmm_(of_logits.T, hidden[part])
            else:
                of_weight += of_logits.T @ hidden[part]
        cast_bias = None if bias is None or of_bias is None else of_bias.to(bias.dtype)
        return of_hidden, of_weight.to(weight.dtype), cast_bias, None, None, None, None
