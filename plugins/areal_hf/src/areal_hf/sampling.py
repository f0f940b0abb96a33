"""Draws tokens reproducibly, independent of the other requests in the batch.

The random number of a token depends only on the request's seed and the token's position. Requests share no generator
state. So a request draws the same tokens alone, in a batch, or after an interruption.
"""

from __future__ import annotations

import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_MANTISSA = (1 << 53) - 1


def signed_seed(seed: int) -> int:
    """Return the lowest 64 bits of `seed` as the signed number that an int64 tensor holds."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's finalizer. int64 wraps around like uint64; the masks clear the shifted-in sign bits."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _FIRST_FACTOR
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _SECOND_FACTOR
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return numbers in [0, 1) with 53 random bits, one for each pair of seed and position.

    Args:
        seeds: [B] int64, any values. Neighboring seeds give unrelated numbers.
        positions: [B] int64, positions of the tokens in their sequences.

    Returns:
        [B] float64.
    """
    # Seeds are mixed before positions are added. Otherwise seed s at position p + 1 equals seed s + gamma at p.
    state = _mixed(_mixed(seeds + _GOLDEN_GAMMA) + (positions + 1) * _GOLDEN_GAMMA)
    return ((state >> 11) & _MANTISSA).to(torch.float64) * 2.0**-53


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    greedy: torch.Tensor | None = None,
    forbidden: torch.Tensor | None = None,
    top: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token for each row, by inverting the cumulative distribution at the row's random number.

    Args:
        logits: [B, V], any floating dtype.
        temperatures: [B, 1] float32, above 0.
        uniforms: [B] float64 in [0, 1).
        greedy: [B] bool, True for rows that take the most probable token.
        forbidden: [B, V] bool, True for tokens that are not drawn (stop tokens before the minimum length).
        top: K, the number of likeliest tokens to return.

    Returns:
        Tokens [B] int64, and their log-probabilities [B] float32: log-softmax(logits / temperature) over the whole
        vocabulary, including forbidden tokens. Then the likeliest tokens [B, K] int64, in descending order, and their
        log-probabilities [B, K] float32.
    """
    log_probabilities = torch.log_softmax(logits.float() / temperatures, dim=-1)
    drawable = log_probabilities
    if forbidden is not None:
        drawable = log_probabilities.masked_fill(forbidden, float("-inf"))
    # A float32 sum over a large vocabulary would lose the tail.
    cumulative = drawable.exp().to(torch.float64).cumsum(dim=-1)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy, drawable.argmax(dim=-1), tokens)
    top_logprobs, top_ids = (
        log_probabilities.topk(top) if top else (log_probabilities[:, :0], tokens.unsqueeze(1)[:, :0])
    )
    return tokens, log_probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1), top_ids, top_logprobs
