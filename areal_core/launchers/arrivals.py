"""Waiting for the nodes that a launcher brings, and for those that go."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.interfaces.launcher import Launcher

START_TIMEOUT_S = 120.0
PROGRESS_S = 10.0


def no_word(awaited: Mapping[str, float]) -> str:
    """That a run which ends waits for nodes: by their names, the seconds after which nothing runs there any more."""
    return f"no word from {', '.join(awaited)}: what runs there ends within {max(awaited.values()):.0f} s"


async def wait_for_nodes(
    launcher: Launcher, count: int, there: Mapping[str, object], say: Callable[[str], None], folder: Path
) -> dict[str, str]:
    """Wait until all nodes have come, or are known not to, or nobody waits any longer.

    Args:
        launcher: brings them.
        count: of nodes.
        there: those that have come, by name; grows meanwhile.
        say: told of nodes that are left out, and now and then of those that are waited for.
        folder: of the run, for the command that brings a node by hand.

    Returns:
        The nodes that are lost, by name, each with the reason.
    """
    began = time.monotonic()
    joining_s = getattr(launcher, "joining_s", 0.0)  # few have it
    told = began - PROGRESS_S if joining_s else began  # who has to type the command sees it at once
    limit_s, hint = joining_s or START_TIMEOUT_S, f"; on each of the others: areal join {folder}" * bool(joining_s)
    lost: dict[str, str] = {}
    while len(there) + len(lost) < count:
        now = time.monotonic()
        for name, reason in launcher.lost().items():
            if name not in lost:
                lost[name] = reason
                say(f"the node {name} is left out: {reason}")
        if now - began > limit_s:
            here = f"{len(there)} of {count} nodes have reported within {limit_s:g} s"
            say(f"{here}: the run does without the others")
            break
        if now - told > PROGRESS_S:
            told = now
            names = f" ({', '.join(sorted(there))})" if there else ""
            say(f"waiting for nodes: {len(there)} of {count} have reported{names}{hint}")
        await asyncio.sleep(0.02)
    return lost
