"""The order of prompts and the seeds of samples, as pure functions of a group's number.

The n-th prompt group of a run always has the same row and epoch, and the seeds of its samples depend only on these. So
one integer is a run's position in its data, and a group that is dispatched again after a crash is the same group.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

from areal_core.errors import ConfigError


class PromptSampler:
    """Maps the number of a prompt group to (row, epoch). Every epoch has each row once.

    Args:
        rows: number of rows in the data set.
        seed: seed of the run.
        shuffle: whether each epoch has a permutation of its own; otherwise rows come in order.

    Raises:
        ConfigError: the data set is empty.
    """

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        if rows < 1:
            raise ConfigError("the data set is empty: it has no row to prompt with")
        self.rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, number: int) -> tuple[int, int]:
        epoch, position = divmod(number, self.rows)
        return (self._order(epoch)[position] if self._shuffle else position), epoch

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self.rows))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def sample_seed(seed: int, row: int, epoch: int, sample_index: int, turn: int = 0) -> int:
    """Return the 63-bit seed of one generation."""
    name = f"{seed}/{row}/{epoch}/{sample_index}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
