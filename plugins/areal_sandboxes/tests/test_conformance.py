"""The suites, on what this plugin supplies."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest

from areal_testing.conformance import PluginSuite, RewardSuite, SandboxSuite

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")


class TestPlugin(PluginSuite):
    plugin = "sandboxes"


@pytest.mark.slow
@needs_bubblewrap
class TestBubblewrap(SandboxSuite):
    component = "sandboxes/bubblewrap"
    settings: ClassVar = {"memory_mib": 256, "processes": 32}
    memory_mib = 300
    processes = 33


@pytest.mark.slow
@needs_bubblewrap
class TestBubblewrapWithoutACgroup(SandboxSuite):
    component = "sandboxes/bubblewrap"
    settings: ClassVar = {"memory_mib": 256, "processes": 32, "cgroup": "never"}
    memory_mib = 300
    processes = 33


class TestNone(SandboxSuite):
    component = "sandboxes/none"
    isolates = False


@pytest.mark.slow
@needs_bubblewrap
class TestUnitTests(RewardSuite):
    component = "sandboxes/unit_tests"
    settings: ClassVar = {"share": True}
    row: ClassVar = {"prompt": "Write add.", "tests": "assert add(1, 2) == 3\nassert add(1, 1) == 2\n"}
    examples = (
        ("def add(a, b):\n    return a + b", 1.0),
        ("So:\n```python\ndef add(a, b):\n    return 3\n```\n", 0.5),
        ("```python\ndef add(a, b):\n    return 0\n```\n", 0.0),
    )
