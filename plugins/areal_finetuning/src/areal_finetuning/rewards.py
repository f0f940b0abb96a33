"""Rewards for algorithms that use none. This module does not import torch, because reward processes load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def no_reward() -> float:
    """Return 0 for every answer. Workflows need a reward; distillation ignores it."""
    return 0.0


def place(row: Mapping[str, Any], *, key: str, values: Sequence[str]) -> float:
    """Return the place of `row[key]` among `values`, from 0. With weight 0 it chooses the row's teacher.

    Example:
        >>> place({"prompt": "2+2=", "teacher": "math"}, key="teacher", values=["code", "math"])
        1.0

    Raises:
        ValueError: the row has another value.
    """
    if row.get(key) not in values:
        raise ValueError(f"the row's '{key}' is {row.get(key)!r}, which is none of {', '.join(values)}")
    return float(values.index(row[key]))
