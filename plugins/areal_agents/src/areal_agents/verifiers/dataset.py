"""Rows from a taskset of verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_agents.verifiers.process import taskset_program
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_agents.verifiers.config import VerifiersDataSettings


class VerifiersDataset:
    """A `Dataset` whose rows are `{"task": DATA}`, with the data that verifiers has for a task.

    Args:
        settings: the taskset, and which of its tasks to take.

    Raises:
        RunError: the taskset cannot be loaded, or has no tasks from `first` on.
    """

    def __init__(self, settings: VerifiersDataSettings) -> None:
        limit = None if settings.size is None else settings.first + settings.size
        self._tasks = taskset_program(settings, limit).list_rows("tasks")[settings.first :]
        if not self._tasks:
            raise RunError(f"the taskset {settings.taskset_id} has no task {settings.first}")

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {"task": self._tasks[index]}
