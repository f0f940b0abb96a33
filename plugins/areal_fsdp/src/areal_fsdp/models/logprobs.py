"""Log-probabilities and entropy from hidden states, without the logits of all tokens in memory.

The logits of a chunk of tokens are computed, reduced to one or two numbers per token, and freed. The backward pass
recomputes them. Its formulas, with z = logits / T, p = softmax(z), H = -sum(p log p):

    d log p_y / d z_j = [j = y] - p_j          d H / d z_j = -p_j (log p_j + H)

On a GPU, half-precision hidden states give float32 logits without rounding, and the weight's gradient is accumulated in
float32. With `compiled`, one kernel reads the logits once and reduces them, and another one computes their gradient, so
that the entropy costs only a few operations.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from areal_fsdp.models.compiling import compiled as compile_function
from areal_fsdp.models.compiling import mark_dynamic
from areal_fsdp.planning.memory import chunk_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from areal_fsdp.parallel.tensor import Vocabulary

_SMALL_CHUNK_ELEMENTS = 2**20
"""Logits that a chunk may always have (4 MiB in float32), so that a tiny vocabulary does not need many chunks."""


def default_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits may exist at the same time, from the device's memory."""
    is_gpu = device.type == "cuda"
    return chunk_tokens(vocabulary, torch.cuda.get_device_properties(device).total_memory if is_gpu else None)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    compiled: bool = False,
    vocabulary: Vocabulary | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log_softmax((hidden @ weight.T + bias) / temperature) at one or several tokens, and the entropy.

    Args:
        hidden: [T, hidden size].
        weight: [vocabulary, hidden size] in the dtype of `hidden`; only this rank's rows with a `vocabulary`.
        bias: [vocabulary] or None; only this rank's part with a `vocabulary`.
        targets: [T] or [T, N] int64. Log-probabilities of N tokens cost one pass, as that of one does.
        temperature: greater than 0.
        chunk_tokens: tokens whose logits exist at the same time; more for a tiny vocabulary.
        with_entropy: True to return the entropy.
        compiled: True to compile the reductions of the logits.
        vocabulary: split of the vocabulary over ranks; None if this rank has all of it.
        cap: soft cap of the logits, applied before the temperature; None without one.

    Returns:
        Log-probabilities in the shape of `targets`, and the entropy in nats [T] or None; float32.
    """
    chunk = max(chunk_tokens, _SMALL_CHUNK_ELEMENTS // len(weight))
    columns = targets[:, None] if targets.dim() == 1 else targets
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, columns, temperature, chunk, with_entropy, compiled, vocabulary, cap
    )
    # A copy: FSDP puts hooks on the outputs of a module, which must not be views.
    return logprobs if targets.dim() > 1 else logprobs[:, 0].clone(), entropy


def chunks(total: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size`: as few as possible, and of nearly equal length."""
    size = -(-total // max(1, -(-total // size)))
    return (slice(start, start + size) for start in range(0, total, size))


def logits_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cap: float | None = None
) -> torch.Tensor:
    """Return logits [tokens, vocabulary] float32 in new memory; with a soft cap, cap x tanh(logit / cap)."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        logits = F.linear(hidden, weight, bias).float()
    else:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        logits = logits if bias is None else logits.add_(bias)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def slope_of_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the derivative of soft-capped logits with respect to the uncapped ones: 1 - (logit / cap)^2."""
    return logits.div(cap).square_().neg_().add_(1)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left.T @ right to the float32 tensor `total`, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left.T, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left.T, right, torch.float32, out=total)
    else:
        total += left.T @ right


def head_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunk: int,
    gradient: Callable[[slice], torch.Tensor],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of a head's hidden states, weight and bias, in their dtypes.

    The gradients of weight and bias are accumulated in float32.

    Args:
        hidden: see `token_logprobs`.
        weight: see `token_logprobs`.
        bias: see `token_logprobs`.
        chunk: tokens whose logits exist at the same time.
        gradient: returns the gradient of the logits of a slice of tokens, [tokens, vocabulary] in the dtype of
            `hidden`.
        wanted: True for each of hidden states, weight and bias that needs a gradient; a frozen head's is not computed.
    """
    of_hidden = torch.empty_like(hidden)
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
    for part in chunks(len(hidden), chunk):
        of_logits = gradient(part)
        if of_bias is not None:
            of_bias += of_logits.sum(0, dtype=torch.float32)
        torch.mm(of_logits, weight, out=of_hidden[part])
        if of_weight is not None:
            add_product(of_weight, of_logits, hidden[part])
        del of_logits  # free it before the next chunk's logits are computed
    of_head = [None if value is None else value.to(weight.dtype) for value in (of_weight, of_bias)]
    return of_hidden, of_head[0], of_head[1]


def _reduce(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the logarithm of the denominator, the targets' log-probabilities, and the entropy; overwrite `logits`.

    The log-probability of a target outside these logits is meaningless.

    Args:
        logits: [tokens, vocabulary] float32.
        targets: [tokens, N] int64.
        temperature: divides the logits.
        with_entropy: True to return the entropy.

    Returns:
        [tokens], [tokens, N] and [tokens] float32, or None for the last.
    """
    scaled = logits if temperature == 1 else logits.div_(temperature)
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, _nearest(targets, logits)) - normalizer[:, None]
    if not with_entropy:
        return normalizer, logprobs, None
    scaled -= normalizer[:, None]
    return normalizer, logprobs, -(scaled.exp() * scaled).sum(-1)


def _reduce_for_compiler(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute `_reduce` in blocks that fit registers, so that compiled code reads the logits once and writes none."""
    scaled = (logits if temperature == 1 else logits / temperature).view(len(logits), -1, _block(logits.shape[1]))
    tops = scaled.amax(-1)
    shifted = scaled - tops[..., None]
    powers = shifted.exp()
    sums, weighted = powers.sum(-1), (powers * shifted).sum(-1)
    top = tops.amax(-1)
    below = tops - top[:, None]
    factors = below.exp()
    total = (sums * factors).sum(-1)
    lse = total.log()
    logprobs = logits.gather(1, _nearest(targets, logits)) / temperature - (top + lse)[:, None]
    mean = (factors * (weighted + sums * below)).sum(-1) / total  # mean of the scaled logits minus their top
    return top + lse, logprobs, lse - mean if with_entropy else None


def _nearest(targets: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return targets, clamped to valid indices: another rank may have a target."""
    return targets.clamp(0, logits.shape[1] - 1)


def _block(vocabulary: int) -> int:
    """Return the size of a block of logits; the whole vocabulary, which is read twice, if no block size divides it."""
    return next((size for size in (512, 256, 128, 64) if vocabulary % size == 0), vocabulary)


def _of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    of_logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of the logits, by the formulas above; overwrite `logits`."""
    log_p = (logits if temperature == 1 else logits.div_(temperature)).sub_(normalizer[:, None])
    p = log_p.exp()
    scale = -of_logprobs.sum(-1, keepdim=True)
    if of_entropy is not None and entropy is not None:
        scale = log_p.add_(entropy[:, None]).mul_(-of_entropy[:, None]).add_(scale)
    of_target = of_logprobs * ((targets >= 0) & (targets < logits.shape[1]))
    result = p.mul_(scale).scatter_add_(1, _nearest(targets, logits), of_target)
    return result.div_(temperature).to(dtype)


def _of_logits_for_compiler(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    of_logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `_of_logits` so that compiled code reads the logits once and writes the gradient once."""
    log_p = (logits if temperature == 1 else logits / temperature) - normalizer[:, None]
    scale = of_logprobs.sum(-1, keepdim=True)
    if of_entropy is not None and entropy is not None:
        scale = scale + of_entropy[:, None] * (log_p + entropy[:, None])
    if targets.shape[1] > 1:
        of_targets = of_logprobs * ((targets >= 0) & (targets < logits.shape[1]))
        result = (log_p.exp() * -scale).scatter_add(1, _nearest(targets, logits), of_targets)
    else:  # a comparison is fused with the rest, a scatter is not
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets
        result = torch.where(is_target, of_logprobs, 0.0) - log_p.exp() * scale
    return (result / temperature).to(dtype)


@cache
def _functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    if not compiled:
        return _reduce, _of_logits
    return _any_tokens(compile_function(_reduce_for_compiler)), _any_tokens(compile_function(_of_logits_for_compiler))


def _any_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        for value in inputs:
            mark_dynamic(value, 0)
        return function(*inputs)

    return call


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
        compiled: bool,
        vocabulary: Vocabulary | None,
        cap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if vocabulary is not None:
            targets = vocabulary.local_ids(targets, len(weight))
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs = normalizer.new_empty(targets.shape)
        entropy = torch.empty_like(normalizer) if with_entropy else None
        reduce, _ = _functions(compiled)
        for part in chunks(len(hidden), chunk):
            logits = logits_of(hidden[part], weight, bias, cap)
            normalizer[part], logprobs[part], chunk_entropy = reduce(logits, targets[part], temperature, with_entropy)
            del logits  # free them before the next chunk's are computed
            if entropy is not None:
                entropy[part] = chunk_entropy
        if vocabulary is not None:
            inside = (targets >= 0) & (targets < len(weight))
            chosen = torch.where(inside, logprobs + normalizer[:, None], 0.0)
            normalizer, logprobs, entropy = vocabulary.combine(normalizer, chosen, entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.compiled = temperature, chunk, compiled
        ctx.vocabulary, ctx.cap = vocabulary, cap
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = normalizer.new_zeros(targets.shape)
        _, gradient_of_logits = _functions(ctx.compiled)

        def gradient(part: slice) -> torch.Tensor:
            logits = logits_of(hidden[part], weight, bias, ctx.cap)
            slope = None if ctx.cap is None else slope_of_cap(logits, ctx.cap)
            of_logits = gradient_of_logits(
                logits,
                targets[part],
                normalizer[part],
                of_logprobs[part],
                None if of_entropy is None else entropy[part],
                None if of_entropy is None else of_entropy[part],
                ctx.temperature,
                hidden.dtype,
            )
            return of_logits if slope is None else of_logits.mul_(slope)

        of_hidden, *others = head_gradients(hidden, weight, bias, ctx.chunk, gradient, ctx.needs_input_grad)
        if ctx.vocabulary is not None:
            of_hidden = ctx.vocabulary.sum(of_hidden)
        return of_hidden, *others, *(None for _ in range(7))
