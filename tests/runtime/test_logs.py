"""Log files of processes stay short, and their ends are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.runtime.logs import LAST_LINES, bound_log, last_words

if TYPE_CHECKING:
    from pathlib import Path


def test_a_log_that_is_too_long_is_emptied_and_its_end_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("0123456789")
    bound_log(log, limit=10)
    assert log.read_text() == "0123456789"
    with log.open("a") as writer:
        writer.write("abcd")
        writer.flush()
        bound_log(log, limit=10)
        writer.write("ef")
    assert log.read_text() == "ef"
    kept = log.with_name("trainer-0.log.1")
    assert kept.read_text() == "456789abcd"
    assert kept.stat().st_mode & 0o777 == 0o600, "some programs write their keys into their logs"


def test_the_last_lines_of_a_log_are_shown_and_no_log_has_none(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    assert last_words(log) == ""
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert last_words(log).split("\n") == [f"line {number}" for number in range(100 - LAST_LINES, 100)]
