"""Settings of workflows with tools. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from areal_agents.config import ConversationSettings
from areal_core.config import Seconds, Selection, component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class ToolSettings(ConversationSettings):
    """A conversation in which the policy calls functions of Python."""

    prompt_key: str = Field(default="prompt", description="the row's key that holds the task: text or messages")
    system: str | None = Field(default=None, description="system message in front")
    tools: list[Selection] = component("tools", default=[], description="typed functions that the policy may call")
    max_turns: int = Field(default=8, ge=1, description="answers of the policy in one episode")
    tool_timeout_s: Seconds = Field(default=30.0, gt=0, description="for one call of a tool")
    longest_result: int = Field(default=4000, ge=1, description="characters of a result; what is longer is cut")

    def check(self, config: RunConfig) -> Iterable[str]:
        """There must be one."""
        del config
        if not self.tools:
            yield "tools: name at least one; without tools use core/single_turn"

    def check_row(self, row: dict[str, Any]) -> str:
        """Before a run: what keeps it from playing this row; empty where nothing does."""
        words = f"has no '{self.prompt_key}', only {', '.join(row)}: set workflow.prompt_key, or mend the data"
        return "" if self.prompt_key in row else words
