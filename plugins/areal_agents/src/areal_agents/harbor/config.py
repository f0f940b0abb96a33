"""Settings of tasks of Harbor. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from areal_agents.config import ConversationSettings
from areal_core.config import LocalPath, Seconds, Selection, Settings, component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig

SYSTEM = "You solve tasks in a Linux shell. Call bash to run commands. When the task is done, answer without a call."


class HarborDataSettings(Settings):
    """Tasks of Harbor in a folder."""

    path: LocalPath = Field(description="Folder of a task, with its task.toml, or a folder with folders of tasks.")
    tasks: list[str] | None = Field(default=None, description="Names of the tasks' folders to take. null: all.")
    skip_unsupported: bool = Field(
        default=False,
        description="Leave out the tasks that need a container or something else that the sandbox does not have, "
        "instead of refusing the data set.",
    )
    first: int = Field(default=0, ge=0, description="Number of the first task to take, in the order of their names.")
    size: int | None = Field(default=None, ge=1, description="Number of tasks to take. null: all of them.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield why the tasks cannot be read. Paths on other nodes are not checked."""
        if config.launcher.target == "core/local" and not Path(self.path).is_dir():
            yield f"path: there is no folder {self.path}"


class HarborSettings(ConversationSettings):
    """Episodes in which the policy solves a task in a shell, and the task's tests give the reward."""

    sandbox: Selection = component(
        "sandboxes",
        default="sandboxes/bubblewrap",
        description="Sandbox of the policy's commands and of the tests. It must keep folders from one command to the "
        "next, as sandboxes/bubblewrap does. Its limits are those of one command.",
    )
    system: str | None = Field(default=SYSTEM, description="System message at the start of the conversation.")
    max_steps: int = Field(default=30, ge=1, description="Maximum number of the policy's answers in an episode.")
    command_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="Timeout of one of the policy's commands in seconds."
    )
    tests_timeout_s: Seconds = Field(
        default=300.0,
        gt=0,
        description="Timeout of the tests in seconds, if the task's own (`[verifier] timeout_sec`) is not less. The "
        "episode fails.",
    )
    longest_result: int = Field(
        default=8000, ge=1, description="Maximum length of a command's output in characters. A longer one is cut off."
    )
    disk_mib: int = Field(
        default=256,
        ge=1,
        description="Limit in MiB on the files of an episode, checked after each command. The episode fails.",
    )
    reward_key: str = Field(
        default="reward",
        min_length=1,
        description="Name of the reward in the tests' reward.json. Its other numbers become metrics.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield limits of the sandbox that end commands or tests before their timeouts here."""
        del config
        needed = max(self.command_timeout_s, self.tests_timeout_s)
        limits = self.sandbox.keywords() if self.sandbox.is_read else {}
        for name in ("time_s", "cpu_s"):
            if limits.get(name, needed) < needed:
                yield (
                    f"sandbox: its {name} is {limits[name]:g} and ends commands and tests before command_timeout_s and "
                    f"tests_timeout_s; set sandbox.{name} to {needed:g}, or lower these"
                )
