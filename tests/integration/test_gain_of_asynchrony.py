"""Runs whose asynchrony gains less than it costs say so, and no others do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from areal_core.diagnostics import read_findings

if TYPE_CHECKING:
    from conftest import Workplace

WITH_TOOL = """\
import asyncio

from areal_core.workflows.settings import SingleTurnSettings
from areal_core.workflows.single_turn import SingleTurn


class WithTool(SingleTurn):
    def __init__(self):
        super().__init__(SingleTurnSettings())

    async def run_episode(self, row, context):
        episode = await super().run_episode(row, context)
        await asyncio.sleep(3)  # a tool that the answer calls
        return episode
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "is_reported"),
    [
        # Training is negligible, one batch at a time is generated, and a high learning rate makes samples stale soon.
        (["workflow=tool.py:WithTool", "train_engine.learning_rate=5e-2", "rollout.max_pending_batches=1"], True),
        # Training takes as long as generation.
        (["steps=40"], False),
        # Synchronous.
        (["steps=40", "rollout.max_staleness=0", "train_engine.learning_rate=5e-2"], False),
    ],
)
def test_a_run_says_whether_its_asynchrony_pays(workplace: Workplace, changes: list[str], is_reported: bool) -> None:
    (workplace.folder / "tool.py").write_text(WITH_TOOL)
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=16", *changes)
    assert done.code == 0, done.err
    texts = [finding["text"] for finding in read_findings(workplace.folder / "run")]
    assert sum(text.startswith("asynchrony gains less than it costs: a step takes 3") for text in texts) == is_reported
    assert (done.out + done.err).count("asynchrony gains less than it costs") == is_reported
