"""Rows for a resources server of NeMo Gym."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_agents.environments.rows import ListedRows
from areal_agents.foreign_process import read_rows
from areal_agents.nemo_gym.process import server_program
from areal_core.errors import RunError

if TYPE_CHECKING:
    from areal_agents.nemo_gym.config import NemoGymDataSettings


class NemoGymDataset(ListedRows):
    """A `Dataset` of rows as NeMo Gym has them: `responses_create_params`, and what /verify needs.

    Args:
        settings: where the rows are, and which of them to take.

    Raises:
        RunError: the rows cannot be read, or there are none from `first` on.
    """

    def __init__(self, settings: NemoGymDataSettings) -> None:
        last = None if settings.size is None else settings.first + settings.size
        rows = _read_rows(settings)[settings.first : last]
        if not rows:
            raise RunError(f"{settings.path or settings.server} has no row {settings.first}")
        super().__init__(rows)


def _read_rows(settings: NemoGymDataSettings) -> list[dict[str, Any]]:
    if settings.path is None:
        if settings.server is None:
            raise RunError("the data set agents/nemo_gym needs `path` or `server`")
        return server_program(settings, settings.server).list_rows("rows")
    try:
        return read_rows(settings.path, str(settings.path))
    except OSError as error:
        raise RunError(f"{settings.path} cannot be read: {error}") from error
