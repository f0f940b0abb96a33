"""The nodes of a running run in words: what stands on each, what it does, and how long it was not heard."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from areal_core.launchers.nodes import name_order
from areal_core.messages.processes import Owner
from areal_core.runs.places import spans

if TYPE_CHECKING:
    from areal_core.launchers.wardens import Wardens

MOST_NODES = 16
"""That are shown one by one; of more, those that are silent for the longest."""
QUIET_S = 6.0
"""Beyond the slowest beat, after which it is told for how long a process was not heard."""


def describe(wardens: Wardens) -> Owner:
    """How the run is: what each process is doing, where, and when it was heard."""
    alive = [process for process in wardens.processes.values() if not process.ended.done()]
    now = time.monotonic()
    return Owner(
        socket.gethostname(),
        os.getpid(),
        wardens.credentials.epoch,
        {process.name: process.phase.phase for process in alive},
        {process.name: process.node.name for process in alive},
        {name: node.ready.gpus for name, node in wardens.nodes.items()},
        {process.name: process.silent_s for process in alive},
        {name: now - node.heard for name, node in wardens.nodes.items()},
        wardens.is_closing,
        wardens.awaited if wardens.is_closing else {},
    )


def node_rows(owner: Owner) -> list[tuple[str, str]]:
    """A row for each node, by its name; empty where there is only one."""
    if len(owner.silent_nodes) < 2:
        return []
    standing: dict[str, list[str]] = {name: [] for name in owner.silent_nodes}
    for process, node in owner.nodes.items():
        if process in owner.phases and node in standing:
            standing[node].append(process)
    names = sorted(standing, key=lambda name: (-max(owner.silent_nodes[name], QUIET_S), name_order(name)))
    rows = [(name, _describe(owner, name, standing[name])) for name in sorted(names[:MOST_NODES], key=name_order)]
    if len(names) > MOST_NODES:
        longest = max(owner.silent_nodes[name] for name in names[MOST_NODES:])
        rows.append((f"{len(names) - MOST_NODES} more", f"all heard {longest:.0f} s ago or later"))
    return rows


def _describe(owner: Owner, node: str, processes: list[str]) -> str:
    """`trainer 0-7: train, controller: generating; silent for 12 s: trainer 3`."""
    silent = {name: seconds for name in processes if (seconds := owner.silent.get(name, 0.0)) > QUIET_S}
    doing: dict[tuple[str, str], list[str]] = {}
    for name in processes:
        doing.setdefault((_role(name), owner.phases[name]), []).append(name)
    parts = [", ".join(f"{_together(names)}: {phase}" for (_, phase), names in doing.items()) or "nothing"]
    if (seconds := owner.silent_nodes[node]) > QUIET_S:
        parts.append(f"silent for {seconds:.0f} s")
    elif silent:
        parts.append(f"silent for {max(silent.values()):.0f} s: {', '.join(silent)}")
    return "; ".join(parts)


def _role(name: str) -> str:
    stem, _, number = name.rpartition("-")
    return stem if number.isdigit() else name


def _together(names: list[str]) -> str:
    """Names of one role: `trainer 0-7`."""
    numbers = sorted(int(name.rpartition("-")[2]) for name in names if _role(name) != name)
    return f"{_role(names[0])} {spans(numbers)}".strip()
