"""Test the pytest plugin: its fixtures, the values of failed asserts, and failures of background work."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

FIXTURES = ("server_of_each_shape", "engine_by_model", "recorded_server", "adapter_call")
BACKGROUND = """
import asyncio
from areal_core.processes import start_task

def test_its_background_work_fails():
    async def fail():
        raise ValueError("the cause")

    async def body():
        start_task(fail(), "a flush")
        await asyncio.sleep(60)

    asyncio.run(body())

def test_after_it():
    pass
"""
SUITE = """
from areal_testing.conformance import RewardSuite

class TestLength(RewardSuite):
    examples = (("abc", 4.0),)

    def make(self):
        return lambda completion: float(len(completion))
"""


def pytest_of(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an empty folder, with no conftest.py above it."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments],
        cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_fixtures_are_found_without_a_conftest(tmp_path: Path) -> None:
    output = pytest_of(tmp_path, "--fixtures", "-q").stdout
    assert [name for name in FIXTURES if f"\n{name} " not in output] == []


def test_failed_background_work_fails_only_its_test(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, test_background=BACKGROUND)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError: background work failed: a flush" in done.stdout
    assert "ValueError: the cause" in done.stdout


@pytest.mark.slow
def test_a_failed_assert_of_a_suite_shows_its_values(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, "-k", "example", test_reward=SUITE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert 3.0 ==" in done.stdout, done.stdout
