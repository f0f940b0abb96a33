"""Show what the loss makes of an answer that you write: `areal debug` without a sampling model.

    python debug_answer.py grpo/addition 48 algorithm.group_filters=[]

The first words are a config and the answer, which is every sample's of row 0. Breakpoints work in your own code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from areal_core.config import resolve
from areal_core.data import FinishReason, Generation
from areal_core.programs import debug_row
from areal_core.servers import InferenceCapabilities

if TYPE_CHECKING:
    from areal_core.engines import ModelReference
    from areal_core.servers import GenerationRequest


class FixedAnswer:
    """An `InferenceClient` that always generates the same text.

    Args:
        tokenizer: turns the text into tokens.
        text: the answer, without the token that ends it.
    """

    capabilities = InferenceCapabilities(frozenset(), frozenset())

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceClient.generate`. The text is taken as certain: each log-probability is 0."""
        count = len(self._ids)
        return Generation(self._ids, [0.0] * count, [0] * count, FinishReason.STOP)

    async def close(self) -> None:
        """See `InferenceClient.close`. There is no connection."""


def main(config: str, text: str, *overrides: str) -> None:
    """Print the tokens of the row with their values, and the metrics of the update."""

    def open_client(model: ModelReference, tokenizer: Any) -> FixedAnswer:
        return FixedAnswer(tokenizer, text)

    debug_row(resolve(config, overrides=overrides, imports=True), 0, open_client)


if __name__ == "__main__":
    main(*sys.argv[1:])
