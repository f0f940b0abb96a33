"""Drawing tokens: reproducible whatever else is in the batch.

The random number of a token depends on the request's seed and the token's position alone. There is no generator state
that requests would share, so a request draws the same tokens alone, in company, or continued after an interruption.
"""

from __future__ import annotations

import torch

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_MANTISSA = (1 << 53) - 1


def signed_seed(seed: int) -> int:
    """The lowest 64 bits of `seed`, as the signed number that an int64 tensor holds."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. int64 wraps around like uint64; only the shifts must be told to bring in zeros."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _FIRST_FACTOR
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _SECOND_FACTOR
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) with 53 random bits, one for each pair of seed and position.

    Args:
        seeds: [B] int64, any values; neighboring seeds give unrelated numbers.
        positions: [B] int64, position of the token in its sequence.

    Returns:
        [B] float64.
    """
    # Seeds are mixed before positions are added: otherwise seed s at position p + 1 and seed s + gamma at p coincide.
    state = _mixed(_mixed(seeds + _GOLDEN_GAMMA) + (positions + 1) * _GOLDEN_GAMMA)
    return ((state >> 11) & _MANTISSA).to(torch.float64) * 2.0**-53


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    greedy: torch.Tensor | None = None,
    forbidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, by inverting the cumulative distribution at the row's random number.

    Args:
        logits: [B, V], any floating dtype.
        temperatures: [B, 1] float32, above 0.
        uniforms: [B] float64 in [0, 1).
        greedy: [B] bool, rows that take the most probable token.
        forbidden: [B, V] bool, tokens that are not drawn here (stop tokens before the minimum length).

    Returns:
        Tokens [B] int64, and the log-probability [B] float32 of each: log-softmax(logits / temperature) over the whole
        vocabulary, forbidden tokens included.
    """
    log_probabilities = torch.log_softmax(logits.float() / temperatures, dim=-1)
    drawable = log_probabilities
    if forbidden is not None:
        drawable = log_probabilities.masked_fill(forbidden, float("-inf"))
    # In float32 the sum over a large vocabulary would lose the tail.
    cumulative = drawable.exp().to(torch.float64).cumsum(dim=-1)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy, drawable.argmax(dim=-1), tokens)
    return tokens, log_probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)
