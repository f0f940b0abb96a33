"""A data set whose length changes between the checks and the run is refused: the order of prompts depends on it."""

from __future__ import annotations

import pytest

from areal_core.checks.fingerprints import data_record, write_records
from areal_core.errors import RunError
from areal_core.runs.data_length import require_checked_rows
from areal_core.runtime.folder import RunFolder


def test_a_data_set_that_has_grown_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    require_checked_rows(run, 3)  # nothing is recorded for it, as in a job that a scheduler starts
    write_records(
        run, [data_record("dataset", "mine.py:Log", [{"prompt": "a"}] * 3), data_record("evaluation", "x", [])]
    )
    require_checked_rows(run, 3)
    with pytest.raises(RunError, match="the data set had 3 rows when the run was checked and has 4 rows now") as raised:
        require_checked_rows(run, 4)
    assert "copy what grows" in raised.value.hints[0]
