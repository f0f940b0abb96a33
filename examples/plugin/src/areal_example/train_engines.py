"""A training engine. This one is that of areal-fsdp with a further metric; `TrainEngine` lists all methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.data import Metric
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.sdk import LossSpec


class TokenCounting(FSDPEngine):
    """FSDP that counts the tokens of each update, those of prompts too."""

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """See `areal_core.engines.TrainEngine.train`."""
        tokens = sum(work.batch.token_count for work in works)
        return {**super().train(works), "tokens_with_prompts": Metric.sum(float(tokens))}
