"""The core's workflows pass the suite that workflows of plugins pass."""

from __future__ import annotations

from areal_testing.conformance import WorkflowSuite


class TestSingleTurn(WorkflowSuite):
    component = "core/single_turn"
