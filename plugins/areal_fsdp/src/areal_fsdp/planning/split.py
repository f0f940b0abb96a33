"""The split of a batch over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_core.data import split_by_tokens, split_into_microbatches
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of a batch.

    Attributes:
        microbatches: rows of the batch in each micro-batch of this rank; there may be fewer than `rounds`.
        rounds: micro-batches that every rank runs, because collectives of sharded parameters need every rank. A rank
            with fewer runs `dummy` for the rest.
        dummy: row of a micro-batch that does not count: the shortest sequence.
        slots: token slots of all ranks: in each round, all ranks wait for the rank with the most tokens.
    """

    microbatches: list[list[int]]
    rounds: int
    dummy: list[int]
    slots: int

    def rows_by_round(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the rows of each round, and True if they count, or False for a dummy micro-batch."""
        for number in range(self.rounds):
            counts = number < len(self.microbatches)
            yield (self.microbatches[number] if counts else self.dummy), counts

    @classmethod
    def plan(
        cls,
        lengths: list[int],
        units: list[list[int]],
        *,
        rank: int,
        ranks: int,
        max_tokens: int,
        longest: int | None,
        is_padded: bool = False,
    ) -> Split:
        """Split a batch of at least one sequence. Every rank computes the same split, without communication.

        Args:
            lengths: tokens of each sequence.
            units: rows of each sequence group; a group stays in one micro-batch.
            rank: this rank.
            ranks: number of ranks.
            max_tokens: token budget of a micro-batch. A larger group gets a micro-batch of its own.
            longest: the model's max_position_embeddings, None if it has none.
            is_padded: True if a micro-batch is computed as rows, padded to its longest sequence. Then padding counts in
                the budget, and sequences of similar length share a micro-batch.

        Raises:
            RunError: a sequence is longer than `longest`.
        """
        if longest is not None and max(lengths) > longest:
            raise RunError(
                f"a sequence of {max(lengths)} tokens is beyond the model's max_position_embeddings of {longest}",
                hints=["shorten prompts or answers (sampling.max_new_tokens), or use a model with a longer context"],
            )
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        if is_padded:
            parts = _split_padded(lengths, units, ranks, max_tokens)
            rounds = -(-len(parts) // ranks)
        else:
            rounds = -(-len(split_into_microbatches(sizes, max_tokens)) // ranks)
            # Equal sizes: in each round all ranks wait for the largest, and compiled graphs depend on sizes.
            parts = split_by_tokens(sizes, rounds * ranks)
        rows = [[row for unit in part for row in units[unit]] for part in parts]
        microbatches = [sorted(part) for part in rows[rank::ranks] if part]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        tokens = [_padded(lengths, part) if is_padded else sum(lengths[row] for row in part) for part in rows]
        slots = ranks * sum(max(tokens[first : first + ranks]) for first in range(0, len(tokens), ranks))
        return cls(microbatches, rounds, [shortest], slots)


def _padded(lengths: list[int], rows: list[int]) -> int:
    """Return the tokens of these sequences, each padded to the longest."""
    return len(rows) * max((lengths[row] for row in rows), default=0)


def _split_padded(lengths: list[int], units: list[list[int]], ranks: int, max_tokens: int) -> list[list[int]]:
    """Assign units to micro-batches within a budget that counts padding; return the largest micro-batch first.

    Units are sorted by their longest sequence, to keep padding small. While some ranks would be idle in the last round,
    the largest micro-batch with several units is halved.
    """

    def cost(part: list[int]) -> int:
        return _padded(lengths, [row for unit in part for row in units[unit]])

    order = sorted(range(len(units)), key=lambda unit: max(lengths[row] for row in units[unit]), reverse=True)
    parts: list[list[int]] = []
    for unit in order:
        if parts and cost([*parts[-1], unit]) <= max_tokens:
            parts[-1].append(unit)
        else:
            parts.append([unit])
    while len(parts) % ranks and (several := [part for part in parts if len(part) > 1]):
        largest = max(several, key=cost)
        parts.remove(largest)
        parts += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return sorted(parts, key=cost, reverse=True)
