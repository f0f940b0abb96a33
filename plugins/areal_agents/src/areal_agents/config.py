"""Settings of workflows and agents. This module does not import torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from areal_core.chat import template_arguments
from areal_core.config import LocalPath, Seconds, Secret, Selection, Settings, component
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from areal_core.config import RunConfig

Form = Literal["auto", "hermes", "xml", "mistral", "llama", "none"]


class ConversationSettings(Settings):
    """Settings that all conversation workflows share."""

    max_tokens: int = Field(
        default=4096, ge=2, description="Maximum number of tokens in one conversation, answers included."
    )
    max_answers: int = Field(
        default=256, ge=1, description="Maximum number of answers that one episode may request from the model."
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template in Jinja, instead of the tokenizer's own. Base models have none. null: the "
        "tokenizer's.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of the chat template, such as {enable_thinking: false}. Those of a request or a row "
        "take precedence, key by key.",
    )
    tool_form: Form = Field(
        default="auto",
        description="Format in which the model writes tool calls. `auto`: detect it from the chat template.",
    )
    trained: Literal["all", "last", "longest"] = Field(
        default="all",
        description="Conversations of an episode that are trained on. Each gets the episode's reward, so with `all` "
        "an episode with many conversations has more tokens in the loss, unless the loss is aggregated by episode.",
    )
    turn_discount: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Discount of conversations by turn: the reward of a conversation that ends k answers before the "
        "last one of the episode is multiplied by this to the power of k. For templates that strip earlier "
        "reasoning, so that each answer is a conversation of its own.",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_arguments(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            template_arguments({}, value or {})
        except RowError as error:
            raise ValueError(str(error)) from None
        return value


class EndpointSettings(ConversationSettings):
    """Settings of workflows that serve the policy at an endpoint."""

    other_sampling: Literal["override", "refuse"] = Field(
        default="override",
        description="What happens to requests with options that the endpoint does not support, such as a "
        "temperature of their own. `override`: answer with the run's sampling; each option is logged once and "
        "counted in `agents/other_sampling/NAME`. `refuse`: return an error that names the options.",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address on which the endpoint listens.")


class AgentSettings(EndpointSettings):
    """Settings of a workflow in which an agent calls an endpoint."""

    agent: Selection = component(
        "agents", description="Agent that runs the episode: a function, a command or a service."
    )


class InterpreterSettings(Settings):
    """Another interpreter, which has a library of environments."""

    library: ClassVar[str]
    """Name of the library, for messages."""

    python: LocalPath | None = Field(
        default=None,
        description="Path of the Python interpreter that has the library and the environment, such as "
        "~/verifiers/bin/python. It is not areal's own: these libraries need other versions of some of areal's.",
    )
    folder: LocalPath | None = Field(
        default=None, description="Folder in which the interpreter runs. It may hold the environment's module."
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the interpreter. Secrets are written env:NAME.",
    )
    start_timeout_s: Seconds = Field(
        default=120.0, gt=0, description="Timeout in seconds for loading the environment and serving it."
    )

    def missing_interpreter(self, config: RunConfig) -> Iterable[str]:
        """Yield why the interpreter cannot be started."""
        if self.python is None:
            yield f"python: missing; write the path of the interpreter that has {self.library}"
        else:
            yield from missing_program(str(self.python), self.folder or Path(), self.variables, config, "python")


class EnvironmentServerSettings(InterpreterSettings):
    """Settings of an environment server."""

    silence_timeout_s: Seconds = Field(
        default=120.0,
        gt=0,
        description="Seconds without an answer to a health check after which a server is considered hung. Its episodes "
        "fail, and it is started again.",
    )


class CommandSettings(Settings):
    """Settings of an agent that is a program in any language."""

    command: list[str] = Field(
        min_length=1, description="Program and its arguments. It gets the row on standard input, as JSON."
    )
    folder: LocalPath | None = Field(
        default=None, description="Working directory of the program. null: that of the run."
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables in addition to the worker's. Secrets are written env:NAME.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the program and its folder exist. Paths on other nodes are not checked."""
        yield from missing_program(self.command[0], self.folder or Path(), self.environment, config, "command")


def resolve_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with each value `env:NAME` replaced by this process's variable NAME.

    Raises:
        ConfigError: this process has no such variable.
    """
    return {name: Secret(text).get() if text.startswith("env:") else text for name, text in environment.items()}


def missing_program(
    program: str, folder: Path, environment: Mapping[str, str], config: RunConfig, key: str
) -> Iterator[str]:
    """Yield why a program of a setting cannot be started in a folder. Paths on other nodes are not checked.

    Args:
        program: name of a program on PATH, or its path relative to `folder`.
        folder: working directory.
        environment: variables of the setting; its PATH takes precedence.
        config: run config; its launcher decides whether paths can be checked here.
        key: name of the setting, for the message.
    """
    if config.launcher.target != "core/local" and "/" in program:
        return
    if not folder.is_dir():
        yield f"folder: there is no folder {folder}"
    path = str((folder / program).absolute()) if "/" in program else program
    if shutil.which(path, path=environment.get("PATH")) is None:
        yield f"{key}: the program {program} was not found or is not executable; install it or write its path"


class ServiceSettings(Settings):
    """Settings of an agent that is an HTTP service."""

    url: str = Field(
        pattern=r"^https?://[^/:?#]",
        description="URL of the service. Each episode is a POST request with {row, endpoint: {base_url, api_key, "
        "model}} as JSON.",
    )
    token: Secret | None = Field(default=None, description="Bearer token of the service, as env:NAME. null: none.")
    connect_timeout_s: Seconds = Field(
        default=30.0,
        gt=0,
        description="Timeout in seconds for connecting to the service. Its answer may take as long as the episode.",
    )
