"""Settings of environments of NeMo Gym. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from areal_agents.config import EndpointSettings, EnvironmentServerSettings, InterpreterSettings
from areal_core.config import LocalPath, Seconds  # noqa: TC001  pydantic evaluates annotations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig

NAME = r"^[A-Za-z_]\w*$"


class NemoGymDataSettings(InterpreterSettings):
    """Rows for a resources server of NeMo Gym."""

    library: ClassVar[str] = "NeMo Gym"

    path: LocalPath | None = Field(
        default=None,
        description="File in JSON lines whose rows have `responses_create_params` and what the server's /verify needs. "
        "null: the example rows of `server`.",
    )
    server: str | None = Field(
        default=None,
        pattern=NAME,
        description="Name of the resources server whose example rows are taken, such as `reasoning_gym`. It needs "
        "`python`, and is ignored if there is a `path`.",
    )
    size: int | None = Field(default=None, ge=1, description="Number of rows to take. null: all of them.")
    first: int = Field(default=0, ge=0, description="Number of the first row to take, for example to hold rows out.")

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield why the rows cannot be read."""
        if self.path is not None:
            return
        if self.server is None:
            yield "path: missing; write the path of a file with rows, or the name of a `server` that has example rows"
        else:
            yield from self.missing_interpreter(config)


class NemoGymSettings(EnvironmentServerSettings, EndpointSettings):
    """Episodes that a resources server of NeMo Gym seeds and verifies."""

    library: ClassVar[str] = "NeMo Gym"

    server: str = Field(
        pattern=NAME, description="Name of the resources server: its folder in `resources_servers`, such as `mcqa`."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the resources server, such as {num_processes: 4}."
    )
    address: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+$",
        description="Address of a resources server that runs already, such as http://10.0.0.5:8000. null: each rollout "
        "worker starts a server.",
    )
    start_timeout_s: Seconds = Field(
        default=300.0,
        gt=0,
        description="Timeout in seconds for loading the server. The first import of NeMo Gym takes up to a minute.",
    )
    max_steps: int = Field(
        default=20,
        ge=1,
        description="Maximum number of answers in an episode. The last one's tool calls are made, then the episode is "
        "verified.",
    )
    request_timeout_s: Seconds = Field(
        default=600.0,
        gt=0,
        description="Timeout in seconds of a request to the resources server: /seed_session, a tool call, or /verify. "
        "The episode fails.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what is missing."""
        if self.address is None:
            yield from self.missing_interpreter(config)
