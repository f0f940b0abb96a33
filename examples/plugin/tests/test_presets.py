"""The preset."""

from areal_core.cli import main


def test_small_run_is_valid():
    assert main(["config", "check", "example/small_run"]) == 0
