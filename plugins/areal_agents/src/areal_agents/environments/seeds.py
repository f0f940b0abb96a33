"""Data set of seeds, and the seed of a row's game."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.environments.config import SeedsSettings

_SEEDS = 2**31
"""Exclusive upper bound of seeds that the libraries accept."""


class Seeds:
    """A `Dataset` for games that need no other data. Its rows are `{"seed": n}`.

    Args:
        settings: number of rows and first seed.
    """

    def __init__(self, settings: SeedsSettings) -> None:
        self._settings = settings

    def __len__(self) -> int:
        return self._settings.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {"seed": self._settings.first + index}


def seed_of(row: Mapping[str, Any], key: str) -> int:
    """Return the seed of a row's game, below 2^31. All episodes of a group get the same one.

    Args:
        row: row of the data set.
        key: key of the seed. If the row does not have it, the seed is a hash of the row's content.

    Raises:
        ValueError: the value under the key is not a whole number from 0 to 2^31 - 1.
    """
    if key not in row:
        content = json.dumps(dict(row), sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") % _SEEDS
    try:
        seed = operator.index(row[key])
    except TypeError:
        seed = -1
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"the row's '{key}' is not a seed, a whole number from 0 to {_SEEDS - 1}: {row[key]!r:.80}")
    return seed
