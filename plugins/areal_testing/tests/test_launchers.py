"""The core's launcher passes the conformance suite of launchers."""

from __future__ import annotations

import pytest

from areal_testing.conformance import LauncherSuite

pytestmark = pytest.mark.slow


class TestLocal(LauncherSuite):
    component = "core/local"
