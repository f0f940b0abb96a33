"""A server's choices of experts in the form in which they travel; see `areal_planning.mixture`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from areal_planning.mixture import ROUTED_EXPERTS

if TYPE_CHECKING:
    from areal_core.data.trajectory import Values
    from areal_planning.mixture import Mixture


def column_of(told: np.ndarray, mixture: Mixture, tokens: int) -> dict[str, Values]:
    """The column of a generation.

    Args:
        told: integers, counted from 0, of all tokens but the newest, all layers of the model and all choices, in this
            order; what stands for layers without experts is not looked at.
        mixture: of the model.
        tokens: how many there are, prompt and answer.

    Returns:
        [T, layers, choices]: nothing predicts the first token.

    Raises:
        ValueError: these are no choices of this model.
    """
    if told.size != (tokens - 1) * mixture.depth * mixture.choices:
        form = f"{tokens - 1} tokens, {mixture.depth} layers and {mixture.choices} choices"
        raise ValueError(f"{told.size} experts, which are not those of {form}")
    every = told.astype(np.int64).reshape(-1, mixture.depth, mixture.choices)
    choices = every[:, list(mixture.layers)]
    if len(choices) and not 0 <= int(choices.min()) <= int(choices.max()) < mixture.experts:
        raise ValueError(f"experts {int(choices.min())} to {int(choices.max())} of {mixture.experts}")
    nothing = np.full((1, *mixture.shape), -1)
    return {ROUTED_EXPERTS: (np.concatenate([nothing, choices]) + 1).astype(mixture.dtype)}
