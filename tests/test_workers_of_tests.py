"""pytest-xdist keeps tests that share a fixture of their file on one worker: the Makefile and conftest.py rely on it.

With a pytest that it does not know it may not, and it says nothing: each worker makes the fixture again, and the tests
of many files take twice as long.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


SLEEPING = """
import pytest, time

@pytest.fixture
def made():
    print("made a fixture")

@pytest.mark.parametrize("number", range(3))
def test(made, number):
    time.sleep(1.5)
"""


def test_tests_after_the_time_limit_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "test_sleeping.py").write_text(SLEEPING)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--time-limit", "1", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    assert "2 tests were not reached in time" in done.stdout
    assert "2  test_sleeping.py" in done.stdout
    assert done.stdout.count("made a fixture") == 1
