"""The fork server stays of one thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from areal_core.launchers.fork_server import ONE_THREAD


def test_pyarrow_which_transformers_imports_where_it_is_installed_starts_no_thread() -> None:
    pytest.importorskip("pyarrow")
    count = "import os, pyarrow; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
