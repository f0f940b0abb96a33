"""How the processes of a run are started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessSpecification:
    """One process of a run: the role that it plays and how it is started.

    Attributes:
        name: unique in the run, such as `trainer-0`; its output goes to `logs/<name>.log`.
        arguments: of the Python interpreter.
        environment: added to the launcher's own.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """Starts the processes of a run and sees to it that they end together.

    The death of one is noticed within seconds and ends the others; nothing is left running after the launcher itself
    dies, however it dies.
    """

    trainer_processes: int

    def start(self, processes: Sequence[ProcessSpecification], run_dir: Path) -> None:
        """Start them all."""
        ...

    def poll(self) -> Mapping[str, int]:
        """Exit codes of the processes that have ended, by name."""
        ...

    def interrupt(self) -> None:
        """Ask the processes to checkpoint and stop."""
        ...

    def stop(self, grace_s: float) -> None:
        """End what still runs, at once after `grace_s` seconds; safe to call twice."""
        ...
