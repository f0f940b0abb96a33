"""Settings of environments of verifiers. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from areal_agents.config import EndpointSettings, EnvironmentServerSettings, InterpreterSettings
from areal_agents.environments.libraries import missing_library

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class TasksetSettings(InterpreterSettings):
    """A taskset of verifiers, and the interpreter that has it."""

    library: ClassVar[str] = "verifiers"

    taskset: str | dict[str, Any] = Field(
        description="Taskset of verifiers: the name of its module, such as `wordle` or `owner/wordle`, or a mapping "
        "with `id` and the taskset's own settings."
    )
    environment: dict[str, Any] = Field(
        default_factory=dict,
        description="Further settings of verifiers' environment (`EnvConfig`): its `id` if the taskset is played by an "
        "environment of its own, and each agent, such as {agent: {harness: {id: bash}, max_turns: 10}}. By default "
        "agents run on this machine and have no shell.",
    )

    @field_validator("taskset")
    @classmethod
    def _has_id(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        identifier = value if isinstance(value, str) else value.get("id")
        if not isinstance(identifier, str) or not identifier:
            raise ValueError("must be the name of a taskset, or a mapping with its name as `id`")
        return value

    @field_validator("environment")
    @classmethod
    def _leaves_taskset_out(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "taskset" in value:
            raise ValueError("the taskset is the setting `taskset`")
        return value

    @property
    def taskset_id(self) -> str:
        """Name of the taskset."""
        return self.taskset if isinstance(self.taskset, str) else str(self.taskset["id"])

    def environment_config(self) -> dict[str, Any]:
        """Return verifiers' config of the environment."""
        taskset = {"id": self.taskset} if isinstance(self.taskset, str) else self.taskset
        return {**self.environment, "taskset": taskset}


class VerifiersDataSettings(TasksetSettings):
    """Rows from a taskset of verifiers."""

    size: int | None = Field(default=None, ge=1, description="Number of tasks to take. null: all of them.")
    first: int = Field(default=0, ge=0, description="Number of the first task to take, for example to hold tasks out.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield why the tasks cannot be listed."""
        yield from self.missing_interpreter(config)


class VerifiersSettings(TasksetSettings, EnvironmentServerSettings, EndpointSettings):
    """Episodes that an environment of verifiers plays."""

    address: str | None = Field(
        default=None,
        pattern=r"^tcp://[^/\s]+:\d+$",
        description="ZeroMQ address of an environment server that runs already, such as tcp://10.0.0.5:5000. It must "
        "reach the endpoint, so set `host` to an address of this machine. null: each rollout worker starts a server.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what is missing."""
        yield from missing_library("the workflow verifiers", "zmq", "verifiers")
        if self.address is None:
            yield from self.missing_interpreter(config)
