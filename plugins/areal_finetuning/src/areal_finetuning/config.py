"""Settings of the algorithms and encoders. Imports no torch, so that a config is checked anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.config import Selection, Settings, component
from areal_core.interfaces import ACTOR

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.interfaces import Pass, Role


class SupervisedSettings(Settings):
    """Supervised fine-tuning: L = -Σ_t w_t log π(y_t), the negative log-likelihood of what the rows say."""

    encoder: Selection = component(
        "encoders", default="finetuning/conversations", description="turns a row into the tokens that are learnt"
    )
    aggregation: Selection = component(
        "aggregations", default="core/token_mean", description="how the tokens' losses are added up"
    )

    def needs(self, updates: int) -> Iterable[Role | Pass]:
        """The model that learns."""
        return (ACTOR,)
