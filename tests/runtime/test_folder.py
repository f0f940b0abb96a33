"""How an attempt has ended is written and read in one form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from areal_core.runtime.folder import Outcome, RunFolder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("done 4", Outcome("done", 4)),
        ("interrupted 4 143", Outcome("interrupted", 4, 143)),
        ("recovering", Outcome("recovering")),
        ("failed 4 1", Outcome("failed", 4, 1)),
    ],
)
def test_an_outcome_is_read_as_it_was_written(text: str, outcome: Outcome, tmp_path: Path) -> None:
    assert str(outcome) == text
    attempt = RunFolder(tmp_path).attempt(1)
    assert attempt.outcome is None
    attempt.path.mkdir(parents=True)
    attempt.released.write_text(str(outcome))
    assert attempt.outcome == outcome


def test_a_file_that_is_just_being_written_has_no_outcome_yet(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    attempt.released.touch()
    assert attempt.outcome is None
