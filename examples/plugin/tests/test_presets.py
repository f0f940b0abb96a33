"""The preset."""

from areal_core.config import resolve


def test_small_run_is_valid():
    assert resolve("example/small_run").config.steps == 3
