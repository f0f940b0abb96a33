"""Data sets: rows by index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Dataset(Protocol):
    """A finite, indexable collection. An index always gives the same row.

    A row is a mapping. The core's workflows read `prompt` (a text, or a list of chat messages) and pass the row to the
    rewards, which read `answer` by convention. For supervised fine-tuning, a row has `prompt` and `completion`.

    Optional methods:

    - `describe_row(index) -> str`: where a row comes from, such as its file and line, for messages.
    - `fingerprint() -> str`: a digest by which a resume detects changed data. Without it, 1,000 rows are compared.
    - `notes() -> Sequence[str]`: sentences about columns that rows omit or have in another form than the source. The
      plan shows them, and a run logs them.

    Example:
        >>> from areal_core.sdk import Dataset
        >>> class Products:
        ...     def __len__(self):
        ...         return 100
        ...
        ...     def __getitem__(self, index):
        ...         a, b = divmod(index, 10)
        ...         return {"prompt": f"What is {a} * {b}?", "answer": str(a * b)}
        >>> dataset: Dataset = Products()
        >>> dataset[67]
        {'prompt': 'What is 6 * 7?', 'answer': '42'}
    """

    def __len__(self) -> int:
        """Return the number of rows, at least one."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row by its index from 0. Callers do not change the mapping."""


def name_row(dataset: object, index: int, title: str = "the data set") -> str:
    """Name a row for messages: its index, and the result of `describe_row` if the data set has this method.

    Args:
        dataset: holds the row.
        index: of the row, from 0.
        title: how the message names the data set.
    """
    place = f"; {dataset.describe_row(index)}" if hasattr(dataset, "describe_row") else ""
    return f"row {index} of {title} (counted from 0{place})"


def notes_of(dataset: object) -> list[str]:
    """Return the notes of a data set; empty if it has no method `notes`."""
    return list(dataset.notes()) if hasattr(dataset, "notes") else []


def unlearnable(error: Exception) -> str:
    """Return why a row cannot be learned from, for a message that begins with the row's name.

    Args:
        error: raised by the example tokenizer. A `ValueError` is its refusal of the row.
    """
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"cannot be learned from: {reason}"
