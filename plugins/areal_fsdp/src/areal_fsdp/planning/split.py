"""Who computes what: the split of a batch over ranks and micro-batches."""

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
        microbatches: rows of the batch, for each micro-batch; fewer than `rounds` where other ranks have more.
        rounds: micro-batches that every rank runs; this rank fills up with `dummy`, because collectives of sharded
            parameters need every rank.
        dummy: rows of a micro-batch that does not count: the shortest sequence.
        slots: tokens that all ranks could have computed while they computed the batch: in each round all wait for the
            one with the most.
    """

    microbatches: list[list[int]]
    rounds: int
    dummy: list[int]
    slots: int

    def rows_by_round(self) -> Iterator[tuple[list[int], bool]]:
        """The rows of each round, and whether they count, or only keep other ranks company."""
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
        """Plan a batch of at least one sequence; every rank plans for all, so nothing has to be sent.

        Args:
            lengths: tokens of each sequence.
            units: the sequences of each unit, which stay together.
            rank: this one.
            ranks: how many.
            max_tokens: budget of a micro-batch; a unit that is over it is one by itself.
            longest: positions that the model has, None if it does not say.
            is_padded: whether a micro-batch is computed as rows as wide as its longest sequence, so that padding
                counts in the budget. Sequences of similar length then go together.

        Raises:
            RunError: a sequence is longer than the model's positions.
        """
        if longest is not None and max(lengths) > longest:
            raise RunError(
                f"a sequence of {max(lengths)} tokens is beyond the model's max_position_embeddings of {longest}",
                hints=["shorten prompts or answers (sampling.max_new_tokens), or take a model with a longer context"],
            )
        sizes = [sum(lengths[row] for row in unit) for unit in units]
        if is_padded:
            dealt = _deal_padded(lengths, units, ranks, max_tokens)
            rounds = -(-len(dealt) // ranks)
        else:
            rounds = -(-len(split_into_microbatches(sizes, max_tokens)) // ranks)
            # All are of like sizes: in each round all ranks wait for the largest, and compiled graphs depend on sizes.
            dealt = split_by_tokens(sizes, rounds * ranks)
        own = [sorted(row for unit in part for row in units[unit]) for part in dealt[rank::ranks] if part]
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        rows = [[row for unit in part for row in units[unit]] for part in dealt]
        held = [_padded(lengths, part) if is_padded else sum(lengths[row] for row in part) for part in rows]
        slots = ranks * sum(max(held[first : first + ranks]) for first in range(0, len(held), ranks))
        return cls(own, rounds, [shortest], slots)


def _padded(lengths: list[int], rows: list[int]) -> int:
    """Tokens of these sequences with each as long as the longest."""
    return len(rows) * max((lengths[row] for row in rows), default=0)


def _deal_padded(lengths: list[int], units: list[list[int]], ranks: int, max_tokens: int) -> list[list[int]]:
    """Deal units to micro-batches within a budget that counts padding, largest micro-batch first.

    Units are taken in the order of their longest sequences, so that few tokens are padding. As long as ranks would have
    nothing to do in the last round, the largest micro-batch that can be halved is.
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
