"""The machines of a run in words: what runs on each, what it does, and how long it was not heard."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.messages.hub import Driving, Process

MOST_NODES = 16
"""That are shown one by one; of more, those that are silent for the longest."""
QUIET_S = 6.0
"""After which it is told for how long a process was not heard."""


def node_rows(driving: Driving) -> list[tuple[str, str]]:
    """A row for each machine, by its name; empty where there is only one."""
    nodes: dict[str, dict[str, Process]] = {}
    for name, process in driving.processes.items():
        nodes.setdefault(process.host, {})[name] = process
    if len(nodes) < 2:
        return []
    silence = {name: max(one.silent_s for one in members.values()) for name, members in nodes.items()}
    names = sorted(nodes, key=lambda name: (-max(silence[name], QUIET_S), name_order(name)))
    rows = [(name, _describe(nodes[name])) for name in sorted(names[:MOST_NODES], key=name_order)]
    if len(names) > MOST_NODES:
        longest = max(silence[name] for name in names[MOST_NODES:])
        rows.append((f"{len(names) - MOST_NODES} more", f"all heard {longest:.0f} s ago or later"))
    return rows


def name_order(name: str) -> tuple[str, int]:
    """For sorting: node-10 comes behind node-9."""
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


def _describe(members: dict[str, Process]) -> str:
    """`trainer 0-7: train, controller: generating; silent for 12 s: trainer-3`."""
    doing: dict[tuple[str, str], list[str]] = {}
    for name, process in sorted(members.items(), key=lambda one: name_order(one[0])):
        doing.setdefault((_stem(name), process.phase), []).append(name)
    told = ", ".join(f"{_together(names)}: {phase}" for (_, phase), names in doing.items())
    silent = {name: one.silent_s for name, one in members.items() if one.silent_s > QUIET_S}
    return f"{told}; silent for {max(silent.values()):.0f} s: {', '.join(silent)}" if silent else told


def _stem(name: str) -> str:
    stem, _, number = name.rpartition("-")
    return stem if number.isdigit() else name


def _together(names: list[str]) -> str:
    """Names of one role: `trainer 0-7`."""
    numbers = sorted(int(name.rpartition("-")[2]) for name in names if _stem(name) != name)
    return f"{_stem(names[0])} {spans(numbers)}".strip()
