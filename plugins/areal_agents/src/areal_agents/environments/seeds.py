"""Which game an episode plays: a seed out of its row, and rows that are nothing but seeds."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.environments.config import SeedsSettings

_SEEDS = 2**31
"""Libraries take a seed below this."""


class Seeds:
    """A `Dataset` for games that need no other data: rows `{"seed": n}`.

    Args:
        settings: how many, and from which on.
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
    """The seed of a row's game, below 2^31: all episodes of a group have the same one.

    Args:
        row: of the data set.
        key: of the seed; a row without it has one that follows from all that it holds.

    Raises:
        ValueError: there is something else under this key.
    """
    if key not in row:
        written = json.dumps(dict(row), sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256(written.encode()).digest()[:4], "big") % _SEEDS
    try:
        seed = operator.index(row[key])
    except TypeError:
        seed = -1
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"the row's '{key}' is not a seed, a whole number from 0 to {_SEEDS - 1}: {row[key]!r:.80}")
    return seed
