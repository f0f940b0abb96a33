"""The launcher passes the suite of launchers, in an allocation of a true SLURM."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(2400)]
SUITE = """\
from areal_testing.conformance import LauncherSuite

class TestSlurm(LauncherSuite):
    component = "slurm/slurm"
    nodes = 2
"""


def test_the_suite(cluster: Any, tmp_path: Path) -> None:
    """Within `salloc`, where alone the launcher is of use."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    pytest_words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "test_suite.py"]
    said = cluster.run("salloc", "--nodes=2", "--no-kill", *pytest_words, folder=tmp_path)
    assert " passed" in said, said
