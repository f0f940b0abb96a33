"""The event hook."""

from areal_example.plugin import areal_run_finished


def test_the_outcome_is_left_in_the_run_folder(tmp_path):
    areal_run_finished(tmp_path, "done")
    assert (tmp_path / "outcome.txt").read_text() == "done\n"
