"""`areal_core.testing`, where the suites and fakes were: its public names warn and work for one minor version."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import areal_testing

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", areal_testing.PUBLIC_MODULES)
def test_a_public_name_warns_and_works_under_its_old_name(module: str) -> None:
    former, now = import_module(module.replace("areal_testing", "areal_core.testing")), import_module(module)
    for name in former._MOVED:  # names that came later have no old place
        with pytest.warns(DeprecationWarning, match=rf"use {module}\.{name}$") as caught:
            assert getattr(former, name) is getattr(now, name)
        assert caught[0].filename == __file__


def test_without_areal_testing_the_error_says_what_to_install() -> None:
    paths = [str(ROOT), *(path for path in sys.path if "areal_testing" not in path)]
    code = "import sys; sys.modules['areal_testing'] = None\nimport areal_core.testing.fakes"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "areal_core.testing is areal_testing now" in done.stderr
    assert "pip install" in done.stderr
    assert "areal_testing" in done.stderr.splitlines()[-1]
