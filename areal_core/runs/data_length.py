"""The length of the data set, on which the order of its rows depends, stays that of the checks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal_core.errors import RunError

if TYPE_CHECKING:
    from areal_core.runtime.folder import RunFolder


def require_checked_rows(run: RunFolder, rows: int) -> None:
    """Compare the length of the data set with the one in the records of the run; the order of prompts depends on it.

    Raises:
        RunError: the data set has grown or shrunk since it was checked.
    """
    records = json.loads(run.plugins.read_text()) if run.plugins.is_file() else []
    checked = [record["version"] for record in records if record["name"] == "dataset"]
    if checked and f"{rows} rows" not in checked:
        raise RunError(
            f"the data set had {checked[-1]} when the run was checked and has {rows} rows now",
            hints=["its length must stay the same during a run: copy what grows, such as a log, and name the copy"],
        )
