"""Texts that end a generation. The generating process knows tokens alone, so an answer is cut where it has arrived.

What stands before the cut was sampled as it would have been with nobody looking, so its log-probabilities hold; what
stands behind it was generated in vain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data import FinishReason, Generation

if TYPE_CHECKING:
    from collections.abc import Sequence


def cut_at_stop(generation: Generation, stop: Sequence[str], tokenizer: Any) -> Generation:
    """A generation up to the token that completes the first of these texts; the whole one where none is in it."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(generation.output_ids[:count], skip_special_tokens=False)
        return any(ending in text for ending in stop)

    low, high = 0, len(generation.output_ids)
    if not has_stop(high):
        return generation
    while high - low > 1:  # a text that is there stays there, however many tokens follow
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle, high)
    ids, logprobs = generation.output_ids[:high], generation.logprobs[:high]
    left_out = len(generation.output_ids) - high
    columns = {name: column[: len(column) - left_out] for name, column in generation.columns.items()}
    return Generation(ids, logprobs, generation.versions[:high], FinishReason.STOP, columns)
