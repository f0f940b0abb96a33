"""List the tasks of an OpenEnv server through its Task API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    Request = Callable[[str, dict[str, Any] | None], tuple[int, str]]
    """Requests a path, by a POST of the JSON object or a GET for None, and returns the answer's status and text."""


def list_tasks(request: Request, split: str, first: int, size: int | None) -> list[dict[str, Any]]:
    """Return a row for each task: its fields, and its `split` and `index`, which select it in the environment's reset.

    Args:
        request: requests a path of the server.
        split: name of the split.
        first: index of the first task.
        size: number of tasks; None for all.

    Raises:
        ValueError: the environment has no tasks, no such split, or fewer tasks; or the server failed.
    """
    names = _json(request, "/list_environments", None)
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"/list_environments must name one environment: {names!r:.200}")
    (name,) = names
    root = f"/{quote(str(name), safe='')}"
    count = _json(request, f"{root}/num_tasks", {"split": split})["num_tasks"]
    stop = count if size is None else first + size
    if first >= stop or stop > count:
        raise ValueError(f"the split {split} has {count} tasks, not {first} to {stop}")
    tasks = _json(request, f"{root}/task_range", {"split": split, "start": first, "stop": stop})["tasks"]
    if len(tasks) != stop - first:
        raise ValueError(f"/task_range returned {len(tasks)} tasks for {first} to {stop} of the split {split}")
    rows = [task if isinstance(task, dict) else {"task": task} for task in tasks]
    return [{**row, "split": split, "index": first + number} for number, row in enumerate(rows)]


def _json(request: Request, path: str, body: dict[str, Any] | None) -> Any:
    status, text = request(path, body)
    if status != 200:
        raise ValueError(f"{path} answered {status}: {text[:1000]}")
    return json.loads(text)
