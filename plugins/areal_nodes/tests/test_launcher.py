"""The launcher `external` passes the conformance suite of launchers, with two agents on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar

import pytest

from areal_core.errors import RunError
from areal_core.launchers import AcceptsNodes
from areal_nodes.agent import NODE_VARIABLE
from areal_nodes.config import ExternalSettings
from areal_nodes.launcher import ExternalLauncher
from areal_testing.conformance import LauncherSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.slow
class TestExternal(LauncherSuite):
    component = "nodes/external"
    nodes = 2
    settings: ClassVar = {"nodes": 2, "host": "127.0.0.1"}
    _agents: ClassVar[list[subprocess.Popen[bytes]]] = []

    def start_nodes(self, run_dir: Path) -> None:
        command = (sys.executable, "-m", "areal_core", "node", str(run_dir))
        for number in range(2):
            variables = {**os.environ, NODE_VARIABLE: f"node-{number}"}
            self._agents.append(subprocess.Popen(command, env=variables))

    @pytest.fixture(autouse=True)
    def agents_end_with_their_run(self) -> Iterator[None]:
        """The suite ends its run with exit code 0."""
        yield
        while self._agents:
            assert self._agents.pop().wait(120) == 0


def test_the_driver_recognizes_the_launcher() -> None:
    assert isinstance(ExternalLauncher(ExternalSettings()), AcceptsNodes)


def test_too_few_machines_are_an_error_that_names_the_command_and_the_address() -> None:
    launcher = ExternalLauncher(ExternalSettings(nodes=2, host="10.0.0.5", start_timeout_s=0.01))
    with pytest.raises(RunError, match=r"0 of 2 machines have joined within 0\.01 s") as caught:
        asyncio.run(launcher.nodes([]))
    assert "areal node RUN_DIR" in caught.value.hints[0]
    assert "10.0.0.5" in caught.value.hints[1]
