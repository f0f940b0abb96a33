"""Playing one episode of an agent in this process."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_agents.config import AgentSettings
from areal_agents.workflow import AgentWorkflow

sys.path.insert(0, str(Path(__file__).parent))  # for modules of tests that are no tests

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies import Policy


@pytest.fixture
def play() -> Callable[..., Any]:
    """Plays one episode of an agent that is a function of this process."""

    def played(policy: Policy, agent: Callable[..., Any], row: dict[str, Any] | None = None, **settings: Any) -> Any:
        async def run() -> Any:
            chosen = AgentSettings.model_validate({"agent": f"{__file__}:_placeholder", **settings})
            workflow = AgentWorkflow(chosen, agent)
            try:
                return await workflow.run_episode(row or {}, policy.context)
            finally:
                await workflow.close()

        return asyncio.run(run())

    return played


@pytest.fixture
def bubblewrap() -> None:
    """Skips a test where bubblewrap is not installed."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed here")


def _placeholder() -> None:
    """Stands in the settings where a test brings its agent itself."""
