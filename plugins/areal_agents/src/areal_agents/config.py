"""Settings of workflows and agents. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from areal_core.chat import template_arguments
from areal_core.config import LocalPath, Seconds, Secret, Selection, Settings, component
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from areal_core.config import RunConfig

Form = Literal["auto", "hermes", "xml", "mistral", "llama", "none"]


class ConversationSettings(Settings):
    """What every workflow of conversations has."""

    max_tokens: int = Field(default=4096, ge=2, description="tokens of one conversation, answers included")
    max_answers: int = Field(default=256, ge=1, description="answers that one episode may ask for")
    chat_template: str | None = Field(
        default=None, description="in Jinja, in place of the tokenizer's own; base models have none"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="arguments of the chat template, such as {enable_thinking: false}; those of a request or "
        "a row take precedence, key by key",
    )
    tool_form: Form = Field(default="auto", description="how the model writes calls; auto looks at its chat template")
    trained: Literal["all", "last", "longest"] = Field(
        default="all",
        description="which conversations of an episode are trained on; each has the episode's reward, so that with "
        "`all` an episode of many conversations has more tokens in the loss, unless the aggregation is by episodes",
    )
    turn_discount: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="a conversation that ends k answers before the episode's last one has its reward times this to the "
        "k: for templates that take earlier thoughts out, so that each answer is a conversation of its own",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_the_templates(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            template_arguments({}, value or {})
        except RowError as error:
            raise ValueError(str(error)) from None
        return value


class AgentSettings(ConversationSettings):
    """An agent that talks to an endpoint."""

    agent: Selection = component("agents", description="a function, a command or a service")
    other_sampling: Literal["override", "refuse"] = Field(
        default="override",
        description="requests with options that the endpoint does not honor, such as a temperature of their own. "
        "`override`: they are answered with the run's sampling, each option is logged once and counted in "
        "`agents/other_sampling/NAME`. `refuse`: they get an error that names the options",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="on which the endpoint listens")


class CommandSettings(Settings):
    """A program of any language."""

    command: list[str] = Field(min_length=1, description="program and arguments; the row is its standard input")
    folder: LocalPath | None = Field(default=None, description="that it starts in; null for the run's own")
    environment: dict[str, str] = Field(default_factory=dict, description="added to the worker's; secrets as env:NAME")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The program must be there, and the folder; what lies on nodes elsewhere is not known here."""
        yield from missing_program(self.command[0], self.folder or Path(), self.environment, config, "command")


def filled(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a setting, with those of this process that they name as `env:NAME`."""
    return {name: Secret(text).get() if text.startswith("env:") else text for name, text in environment.items()}


def missing_program(
    program: str, folder: Path, environment: Mapping[str, str], config: RunConfig, key: str
) -> Iterator[str]:
    """Why a program of a setting cannot be started in a folder; what lies on nodes elsewhere is not known here."""
    if config.launcher.target != "core/local" and "/" in program:
        return
    if not folder.is_dir():
        yield f"folder: there is no folder {folder}"
    place = str((folder / program).absolute()) if "/" in program else program
    if shutil.which(place, path=environment.get("PATH")) is None:
        yield f"{key}: {program} is not a program that can be started here; install it or write its path"


class ServiceSettings(Settings):
    """A service that is called for each episode."""

    url: str = Field(
        pattern=r"^https?://[^/:?#]", description="POST of {row, endpoint: {base_url, api_key, model}} in JSON"
    )
    token: Secret | None = Field(default=None, description="bearer token of the service, as env:NAME")
    connect_timeout_s: Seconds = Field(default=30.0, gt=0, description="to reach it; its answer has the episode's time")
