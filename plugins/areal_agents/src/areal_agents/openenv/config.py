"""Settings of environments of OpenEnv. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from areal_agents.config import ConversationSettings, EnvironmentServerSettings, InterpreterSettings
from areal_core.config import Seconds  # noqa: TC001  pydantic evaluates annotations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class OpenEnvServerSettings(InterpreterSettings):
    """An environment of OpenEnv: a web application to serve, or a server that runs already."""

    library: ClassVar[str] = "OpenEnv"

    app: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$",
        description="Web application of the environment, as MODULE:NAME, such as `echo_env.server.app:app`. Each "
        "rollout worker serves it with `python`.",
    )
    address: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s?#]+$",
        description="Address of a server that runs already, such as a container's or a Space's.",
    )

    @property
    def name(self) -> str:
        """Name of the environment, for messages."""
        return f"OpenEnv's {self.app}" if self.app else "OpenEnv"

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what is missing."""
        if (self.app is None) == (self.address is None):
            yield "app: write either `app`, to serve an environment with `python`, or the `address` of a server"
        elif self.app is not None:
            yield from self.missing_interpreter(config)


class OpenEnvDataSettings(OpenEnvServerSettings):
    """The tasks of an environment's split, from its Task API."""

    split: str = Field(default="train", min_length=1, description="Name of the split.")
    size: int | None = Field(default=None, ge=1, description="Number of tasks to take. null: all of them.")
    first: int = Field(default=0, ge=0, description="Index of the first task to take, for example to hold tasks out.")


class OpenEnvSettings(EnvironmentServerSettings, OpenEnvServerSettings, ConversationSettings):
    """Episodes in an environment of OpenEnv."""

    acts_by: Literal["text", "tools"] = Field(
        default="text",
        description="How the policy acts. `text`: each answer is an action. `tools`: the policy calls the tools that "
        "the environment lists, until it answers without a call.",
    )
    action_key: str = Field(default="message", description="Field of an action that holds the answer's text.")
    action: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of each action, in addition to the answer's text."
    )
    observation_key: str | None = Field(
        default=None,
        description="Field of an observation that holds its text. null: the whole observation, as JSON.",
    )
    reset_keys: list[str] | None = Field(
        default=None,
        description="Keys of the row that are passed to the environment's reset. null: those of `split`, `index` and "
        "`seed` that the row has. []: none, so that the episodes of a group differ.",
    )
    system: str | None = Field(default=None, description="System message at the start of the conversation. null: none.")
    opening_key: str | None = Field(
        default=None,
        description="Key of the row that holds the first user message. null: the first observation is the first "
        "message.",
    )
    max_steps: int = Field(default=20, ge=1, description="Maximum number of the policy's answers in an episode.")
    scored_by: Literal["environment", "rewards"] = Field(
        default="environment",
        description="`environment`: the reward of an episode is the sum of the environment's rewards. `rewards`: the "
        "run's `rewards` score the last answer.",
    )
    longest_result: int = Field(
        default=4000, ge=1, description="Maximum length of a tool's result in characters. A longer result is cut off."
    )
    request_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="Timeout in seconds for one response of the environment. The episode fails."
    )
    session_timeout_s: Seconds = Field(
        default=600.0,
        gt=0,
        description="Seconds that an episode waits for a session, if the server has no free one (its "
        "`max_concurrent_envs`).",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield what is missing, and rewards that nobody would call."""
        yield from super().check(config)
        if self.scored_by == "rewards" and not config.rewards:
            yield "scored_by: the run's rewards are to score the answers, and the config has none; set rewards"

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Yield a note if the config has rewards and only the environment gives any."""
        if config.rewards and self.scored_by == "environment":
            names = ", ".join(chosen.target for chosen in config.rewards)
            yield f"the environment gives the rewards, and {names} is not called; set rewards: [] or scored_by: rewards"
