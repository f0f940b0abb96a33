"""What runs at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What runs at once.

    Attributes:
        requests: rows of a step.
        sequence_length: tokens of one request, prompt and output.
        cache_bytes: of what the model remembers of its tokens, in all.
        prefill_tokens: prompt tokens of one forward, padding included.
    """

    requests: int
    sequence_length: int
    cache_bytes: int
    prefill_tokens: int
