"""What a data set must do: rows by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Dataset(Protocol):
    """A finite, indexable collection; the same index always gives the same row.

    A row is a mapping. Workflows of the core read `prompt` (text, or a list of chat messages) and hand the whole row
    to the reward, which by convention reads `answer`. For supervised fine-tuning a row has `prompt` and `completion`.
    A method `describe_row(index) -> str` is used in messages, where there is one: file and line of a row, say. A method
    `fingerprint() -> str` tells a resume whether the data have changed; without it 1,000 rows are compared. A method
    `notes() -> Sequence[str]` returns sentences about columns that rows hold differently from their source, or not at
    all. The plan shows them, and a run logs them.
    """

    def __len__(self) -> int:
        """How many rows there are; at least one."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The row at a place, from 0; a new mapping each time, or one that nobody changes."""


def name_row(dataset: object, index: int) -> str:
    """A row in words, for whoever has to look it up: its number, and what `describe_row` says."""
    place = f"; {dataset.describe_row(index)}" if hasattr(dataset, "describe_row") else ""
    return f"row {index} of the data set (counted from 0{place})"


def notes_of(dataset: object) -> list[str]:
    """Return what a data set's `notes` returns; nothing where it has no such method."""
    return list(dataset.notes()) if hasattr(dataset, "notes") else []
