"""Limits of concurrent work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of concurrent work.

    Attributes:
        requests: largest number of live requests.
        sequence_length: largest number of tokens of one request, prompt and output together.
        cache_bytes: memory of all cached states.
        prefill_tokens: largest number of prompt tokens in one forward, including padding.
    """

    requests: int
    sequence_length: int
    cache_bytes: int
    prefill_tokens: int
