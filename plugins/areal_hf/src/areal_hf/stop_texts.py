"""Stop strings. The server only knows tokens, so the client cuts an answer after it has arrived.

Tokens before the cut were sampled as without a stop string, so their log-probabilities are right. Tokens after the cut
are wasted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data import FinishReason, Generation

if TYPE_CHECKING:
    from collections.abc import Sequence


def cut_at_stop(generation: Generation, stop: Sequence[str], tokenizer: Any) -> Generation:
    """Return a generation up to the token that completes the first stop string, or all of it if there is none."""

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(generation.output_ids[:count], skip_special_tokens=False)
        return any(ending in text for ending in stop)

    low, high = 0, len(generation.output_ids)
    if not has_stop(high):
        return generation
    while high - low > 1:  # bisection: a stop string stays in the text if more tokens follow
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle, high)
    removed = len(generation.output_ids) - high
    columns = {name: column[: len(column) - removed] for name, column in generation.columns.items()}
    return Generation.of(generation.sampled.first(high), FinishReason.STOP, columns, generation.prompt_logprobs)
