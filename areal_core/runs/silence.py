"""Processes and nodes that are not heard: told after a while, and lost after a longer one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from areal_core.errors import LostError
from areal_core.interfaces.launcher import EndMeans
from areal_core.launchers.wardens import LEASE_S
from areal_core.messages.processes import EndProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from areal_core.launchers.supervised import Node, SupervisedProcess

TOLD_S = 10.0
"""Silence after which it is told."""


class Silences:
    """Who is silent now.

    Args:
        log: the file for the output of a process, by its name.
        say: shows a line to the user.
    """

    def __init__(self, log: Callable[[str], Path], say: Callable[[str], None]) -> None:
        self._log = log
        self._say = say
        self._silent: set[str] = set()
        self._given_up: set[str] = set()

    def check(self, processes: Iterable[SupervisedProcess], nodes: Iterable[Node]) -> None:
        """Tell of those that have fallen silent, were stopped, or are heard again.

        Raises:
            LostError: one without which the run cannot go on was silent, or in one phase, for too long.
        """
        for process in processes:
            self._check_process(process)
        for node in nodes:
            silent = time.monotonic() - node.heard
            self._note(
                node.name, silent, f"the node {node.name}", f" is silent; after {LEASE_S:.0f} s it counts as lost"
            )

    def _check_process(self, process: SupervisedProcess) -> None:
        silent, phase = process.silent_s, process.phase
        is_late = 0 < phase.deadline_s < phase.seconds
        if silent <= TOLD_S and not is_late and process.name not in self._silent:
            return  # as thousands are
        state = "stopped" if process.stopped_at is not None else "silent"
        told = f" is {state} since {silent:.0f} s (phase {phase.phase})"
        hint = f"its log: {self._log(process.name)}"
        if silent > LEASE_S and process.specification.end is EndMeans.ENDS_RUN:
            raise LostError(f"{process.name}{told}: it counts as lost", hints=[hint])
        if is_late and not process.ended.done():
            raise LostError(
                f"{process.name} hangs: it has been in the phase '{phase.phase}' for {phase.seconds:.0f} s, and may be "
                f"for {phase.deadline_s:.0f}",
                hints=[hint, "a slow machine: raise training.phase_timeout_s"],
            )
        if silent > LEASE_S and process.name not in self._given_up:
            self._given_up.add(process.name)
            self._say(f"{process.name}{told}: it is ended")
            process.node.post(EndProcess(process.name, 0.0))  # whoever asked for it knows what to do then
        self._note(process.name, silent, process.name, told)

    def _note(self, name: str, silent: float, who: str, told: str) -> None:
        """Somebody falls silent, or is heard again."""
        if silent > TOLD_S and name not in self._silent:
            self._silent.add(name)
            self._say(f"{who}{told}")
        elif silent <= TOLD_S and name in self._silent:
            self._silent.discard(name)
            self._given_up.discard(name)
            self._say(f"{who} is heard again")
