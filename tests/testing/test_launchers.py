"""The core's launchers pass the suite of launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from areal_core.launchers.node import NODE_VARIABLE
from areal_core.testing.conformance import LauncherSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


class TestLocal(LauncherSuite):
    component = "core/local"


class TestExternal(LauncherSuite):
    component = "core/external"
    nodes = 2
    settings: ClassVar = {"nodes": 2, "host": "127.0.0.1"}
    _programs: ClassVar[list[subprocess.Popen[bytes]]] = []

    def start_nodes(self, run_dir: Path) -> None:
        words = (sys.executable, "-m", "areal_core", "node", str(run_dir))
        for number in range(2):
            variables = {**os.environ, NODE_VARIABLE: f"node-{number}"}
            self._programs.append(subprocess.Popen(words, env=variables))

    @pytest.fixture(autouse=True)
    def nodes_end_with_their_run(self) -> Iterator[None]:
        """That of the suite is done."""
        yield
        while self._programs:
            assert self._programs.pop().wait(120) == 0
