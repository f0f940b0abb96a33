"""The process in which `train` runs `areal run`: its output, its end and its errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core import open_run
from areal_core.errors import ConfigError, UsageError
from areal_core.library.command import _lines, resume_command

if TYPE_CHECKING:
    from pathlib import Path

LEAVES_A_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "3600"])
print(child.pid)
print("last", end="", flush=True)
"""


def test_a_child_that_holds_the_output_open_does_not_hold_the_call() -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES_A_CHILD], stdout=subprocess.PIPE) as process:
        child, last = _lines(process)
    try:
        assert (last, process.returncode) == ("last", 0)
        os.kill(int(child), 0)
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_an_error_of_the_process_has_its_type_and_its_problems(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder"):
        resume_command(tmp_path, {})
    (tmp_path / "config.yaml").write_text("stepz: 3\nplugins: []\n")
    with pytest.raises(ConfigError) as caught:
        open_run(tmp_path).resume()
    assert any("stepz" in problem for problem in caught.value.problems)
