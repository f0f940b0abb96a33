"""Splitting a batch over ranks by tokens, and into micro-batches under a token budget.

Sequences stay whole. No split changes what is learned: the weights of the tokens in the loss are fixed on the whole
batch before it is split.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left


def split_by_tokens(lengths: list[int], parts: int) -> list[list[int]]:
    """Deal sequences out to parts so that their token counts are close: longest first, to the lightest part.

    Args:
        lengths: tokens of each sequence.
        parts: how many; some stay empty where there are fewer sequences than parts.

    Returns:
        For each part the sequences' indices, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, part = heapq.heappop(lightest)
        shares[part].append(index)
        heapq.heappush(lightest, (tokens + lengths[index], count + 1, part))
    return [sorted(share) for share in shares]


def split_into_microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Deal sequences out to micro-batches of nearly equal token counts, as few as keep to a budget when dealt so.

    A sequence over the budget is a micro-batch by itself: it may need more memory than was meant, but dropping it would
    change what is learned, and ending the run would end every resume of it too.

    Args:
        lengths: tokens of each sequence.
        max_tokens: budget of one micro-batch.

    Returns:
        For each micro-batch the sequences' indices, ascending.
    """

    def fits(parts: int) -> bool:
        bins = split_by_tokens(lengths, parts)
        return all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for members in bins)

    filled = sum(min(length, max_tokens) for length in lengths)
    alone = sum(2 * length > max_tokens for length in lengths)  # no two of these fit together
    least = max(alone, -(-filled // max_tokens), min(1, len(lengths)))
    # More parts never hold more, and twice as many fit in any case: the lightest is half full at most.
    return split_by_tokens(lengths, least + bisect_left(range(least, 2 * least), True, key=fits))
