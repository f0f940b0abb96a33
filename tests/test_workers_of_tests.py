"""pytest-xdist keeps tests that share a fixture of their file on one worker: the Makefile and conftest.py rely on it.

With a pytest that it does not know it may not, and it says nothing: each worker makes the fixture again, and the tests
of many files take twice as long.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SHARED = """
import os, pathlib, pytest

@pytest.fixture(scope="module")
def made():
    pathlib.Path(f"made-by-{os.getpid()}").touch()

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(12))
def test(made, number):
    pass
"""


def test_a_group_stays_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout
    assert len(list(tmp_path.glob("made-by-*"))) == 1
