"""Rows from the Task API of an OpenEnv server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from areal_agents.environments.rows import ListedRows
from areal_agents.interpreter._areal_tasks import list_tasks
from areal_agents.openenv.process import app_program
from areal_core.errors import RunError

if TYPE_CHECKING:
    from areal_agents.openenv.config import OpenEnvDataSettings


class OpenEnvDataset(ListedRows):
    """A `Dataset` of the tasks of a split: the fields of each task, and its `split` and `index`.

    Args:
        settings: the environment, and which of its tasks to take.

    Raises:
        RunError: the tasks cannot be listed, or there are fewer.
    """

    def __init__(self, settings: OpenEnvDataSettings) -> None:
        split, first, size = settings.split, settings.first, settings.size
        if settings.address is None:
            super().__init__(app_program(settings, split=split, first=first, size=size).list_rows("tasks"))
            return
        address, limit = settings.address.rstrip("/"), settings.start_timeout_s
        # A proxy of the environment variables would be asked for addresses of this machine, too.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def ask(path: str, body: dict[str, Any] | None) -> tuple[int, str]:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{address}{path}", data, {"Content-Type": "application/json"})
            try:
                with opener.open(request, timeout=limit) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode(errors="replace")

        try:
            super().__init__(list_tasks(ask, split, first, size))
        except (OSError, ValueError) as error:
            raise RunError(f"the tasks of the OpenEnv server {address} cannot be listed: {error}") from error
