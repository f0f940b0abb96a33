"""Processes of a run in words: those of one role that do the same are told together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def describe_phases(phases: Mapping[str, str]) -> str:
    """`controller: generating, trainer 0-5, 7: train, trainer 6: checkpoint`.

    Args:
        phases: by the names of processes.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for name, phase in sorted(phases.items(), key=lambda one: name_order(one[0])):
        alike.setdefault((_stem(name), phase), []).append(name)
    return ", ".join(f"{_together(names)}: {phase}" for (_, phase), names in alike.items())


def name_order(name: str) -> tuple[str, int]:
    """For sorting: worker-10 comes behind worker-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def spans(numbers: Sequence[int]) -> str:
    """Numbers in words: `0-3, 6`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in found)


def _stem(name: str) -> str:
    stem, _, number = name.rpartition("-")
    return stem if number.isdigit() else name


def _together(names: Sequence[str]) -> str:
    """Names of one role: `trainer 0-7`."""
    numbers = [int(name.rpartition("-")[2]) for name in names if _stem(name) != name]
    return f"{_stem(names[0])} {spans(numbers)}".strip()
