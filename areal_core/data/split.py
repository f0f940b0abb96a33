"""Splitting a batch over ranks by tokens, and into micro-batches under a token budget.

Sequences stay whole. No split changes what is learned: the weights of the tokens in the loss are fixed on the whole
batch before it is split.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left


def split_by_tokens(lengths: list[int], parts: int) -> list[list[int]]:
    """Distribute sequences over parts with balanced token counts: longest first, each to the lightest part.

    Args:
        lengths: number of tokens of each sequence.
        parts: number of parts. Some stay empty if there are fewer sequences.

    Returns:
        The indices of the sequences of each part, ascending.

    Example:
        >>> from areal_core.data import split_by_tokens
        >>> split_by_tokens([700, 300, 200, 100], parts=2)
        [[0], [1, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, part = heapq.heappop(lightest)
        shares[part].append(index)
        heapq.heappush(lightest, (tokens + lengths[index], count + 1, part))
    return [sorted(share) for share in shares]


def split_into_microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Distribute sequences over the fewest micro-batches with balanced token counts that keep to a budget.

    A sequence over the budget gets a micro-batch of its own. It may need more memory than planned, but dropping it
    would change what is learned, and an error would end every resume of the run, too.

    Args:
        lengths: number of tokens of each sequence.
        max_tokens: token budget of one micro-batch.

    Returns:
        The indices of the sequences of each micro-batch, ascending.

    Example:
        >>> from areal_core.data import split_into_microbatches
        >>> split_into_microbatches([600, 500, 400, 300], max_tokens=1000)
        [[0, 3], [1, 2]]
    """

    def fits(parts: int) -> bool:
        bins = split_by_tokens(lengths, parts)
        return all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for members in bins)

    filled = sum(min(length, max_tokens) for length in lengths)
    alone = sum(2 * length > max_tokens for length in lengths)  # no two of these fit together
    least = max(alone, -(-filled // max_tokens), min(1, len(lengths)))
    # More parts never hold more, and twice as many fit in any case: the lightest is half full at most.
    return split_by_tokens(lengths, least + bisect_left(range(least, 2 * least), True, key=fits))
