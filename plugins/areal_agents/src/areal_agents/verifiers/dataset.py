"""Rows from a taskset of verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.environments.rows import ListedRows
from areal_agents.verifiers.process import taskset_program
from areal_core.errors import RunError

if TYPE_CHECKING:
    from areal_agents.verifiers.config import VerifiersDataSettings


class VerifiersDataset(ListedRows):
    """A `Dataset` whose rows are `{"task": DATA}`, with the data that verifiers has for a task.

    Args:
        settings: the taskset, and which of its tasks to take.

    Raises:
        RunError: the taskset cannot be loaded, or has no tasks from `first` on.
    """

    def __init__(self, settings: VerifiersDataSettings) -> None:
        limit = None if settings.size is None else settings.first + settings.size
        tasks = taskset_program(settings, limit).list_rows("tasks")[settings.first :]
        if not tasks:
            raise RunError(f"the taskset {settings.taskset_id} has no task {settings.first}")
        super().__init__([{"task": task} for task in tasks])
