"""Settings of workflows with tools and of environments. This module imports neither torch nor the libraries."""

from __future__ import annotations

import random
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from areal_agents.config import ConversationSettings, missing_program
from areal_agents.environments.libraries import load_gymnasium, load_library, missing_library
from areal_agents.environments.spaces import ActionReader
from areal_core.chat import PromptSettings, prompt_of
from areal_core.config import LocalPath, Seconds, Selection, Settings, component
from areal_core.errors import ConfigError
from areal_core.sdk import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig


def _readable_template(template: str) -> str:
    fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if unknown := sorted(fields - {"observation", "actions"}):
        raise ValueError(
            f"the template names {', '.join(unknown)}; its fields are {{observation}} and {{actions}}; "
            "write {{ for a brace"
        )
    return template


Template = Annotated[str, AfterValidator(_readable_template)]


class McpServerSettings(Settings):
    """Settings of a server of the Model Context Protocol: a command to start, or the URL of a running server."""

    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Program and arguments of a server that communicates over standard input and output.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the program, in addition to HOME, PATH and the like. Secrets are "
        "written env:NAME.",
    )
    folder: LocalPath = Field(
        default=Path(),
        validate_default=True,
        description="Working directory of the program. Default: the folder of the config.",
    )
    url: str | None = Field(default=None, pattern=r"^https?://", description="URL of a running server, with its path.")
    per: Literal["worker", "episode"] = Field(
        default="worker",
        description="`worker`: all episodes of a rollout worker share one server. `episode`: each episode has its own.",
    )
    start_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="Timeout in seconds for starting the server and listing its tools."
    )

    @model_validator(mode="after")
    def _check_one_of_two(self) -> McpServerSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("write either command or url")
        return self

    @property
    def title(self) -> str:
        """URL or command of the server, for messages."""
        return self.url or " ".join(self.command or ())


class ToolSettings(ConversationSettings):
    """Settings of a conversation in which the policy calls Python functions or tools of MCP servers."""

    prompt_key: str = Field(
        default="prompt", description="Key of the row that holds the task: text, or a list of messages."
    )
    system: str | None = Field(
        default=None, description="System message for rows that have none of their own. null: none."
    )
    tools: list[Selection] = component(
        "tools", default=[], description="Tools that the policy may call: Python functions with type annotations."
    )
    mcp: list[McpServerSettings] = Field(
        default_factory=list,
        description="Servers of the Model Context Protocol (MCP) whose tools the policy may also call.",
    )
    max_turns: int = Field(default=8, ge=1, description="Maximum number of the policy's answers in one episode.")
    tool_timeout_s: Seconds = Field(default=30.0, gt=0, description="Timeout of one tool call in seconds.")
    longest_result: int = Field(
        default=4000, ge=1, description="Maximum length of a tool's result in characters. A longer result is cut off."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that there is a tool, and that the servers' programs and the MCP library are installed."""
        if not self.tools and not self.mcp:
            yield "tools: name at least one, or a server in mcp; without tools use core/single_turn"
        if self.mcp:
            yield from missing_library("tools of mcp", "mcp", "mcp")
        for server in self.mcp:
            if server.command:
                yield from missing_program(server.command[0], server.folder, server.environment, config, "mcp")

    @property
    def prompt(self) -> PromptSettings:
        """Settings that turn a row into the start of a conversation. The tools come from the workflow, not the row."""
        return PromptSettings(
            prompt_key=self.prompt_key,
            system=self.system,
            chat_template="always",
            chat_template_kwargs=self.chat_template_kwargs,
            tools_key=None,
            text_has_special_tokens=False,
        )

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why a row cannot open a conversation; empty if it can."""
        del tokenizer
        try:
            prompt_of(row, self.prompt)
        except RowError as error:
            return str(error)
        return ""


class SeedsSettings(Settings):
    """Settings of a data set whose rows hold only a seed."""

    size: int = Field(ge=1, description="Number of rows, one seed each.")
    first: int = Field(
        default=0,
        ge=0,
        description="First seed; the others count up from it. Choose ranges that do not overlap for training and "
        "evaluation.",
    )


class GameSettings(Settings):
    """Settings that all games share."""

    id: str = Field(min_length=1, description="Name of the game in its library.")
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments with which the game is created."
    )
    max_steps: int | None = Field(
        default=None, ge=1, description="Maximum number of the policy's turns. null: the game's own limit."
    )
    seed_key: str = Field(
        default="seed",
        description="Key of the row that holds the game's seed. A row without this key gets a seed computed from "
        "its content.",
    )


class GymnasiumSettings(GameSettings):
    """Settings of a game of gymnasium that is played as text."""

    system: str | None = Field(default=None, description="System message at the start of the conversation. null: none.")
    opening: Template = Field(
        default="{observation}\n\nSay {actions}.",
        description="Template of the first user message, with {observation} and {actions}.",
    )
    turn: Template = Field(
        default="{observation}",
        description="Template of the message after each of the policy's turns, with {observation} and {actions}.",
    )
    observation: Literal["value", "rendering"] = Field(
        default="value",
        description="How an observation becomes text. `value`: its value, with names and numbers. `rendering`: the "
        "text that the game renders (render_mode: ansi).",
    )
    describe: Selection | None = component(
        "tools",
        description="Function that turns an observation into text, such as mine.py:describe. null: the text that "
        "`observation` chooses.",
    )
    actions: dict[str, Any] = Field(
        default_factory=dict,
        description="Names of actions and their values, such as {left: 0, right: 2}. Without names, the policy "
        "writes the value.",
    )
    invalid_reward: float = Field(
        default=-0.1,
        allow_inf_nan=False,
        description="Reward of a turn that names no valid action. The game does not see that turn.",
    )
    step_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="Timeout in seconds for the game to process one turn."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that gymnasium is installed and that the game can be created."""
        del config
        if missing := list(missing_library("the environment gymnasium", "gymnasium", "gymnasium")):
            yield from missing
            return
        try:
            game, _ = self.open_game()
        except ConfigError as error:
            yield str(error)
        else:
            game.close()

    def open_game(self) -> tuple[Any, ActionReader]:
        """Create the game and the reader of its actions.

        Raises:
            ConfigError: gymnasium is not installed or has no such game, or the game rejects the arguments or actions.
        """
        as_text = {"render_mode": "ansi"} if self.observation == "rendering" else {}
        try:
            game = load_gymnasium().make(self.id, **(self.arguments | as_text))
        except Exception as error:
            raise ConfigError(
                f"gymnasium cannot make the game '{self.id}': {type(error).__name__}: {error}",
                hints=[
                    "id is the game's name, prefixed by `module:` if a module registers it; arguments go to "
                    "gymnasium.make"
                ],
            ) from error
        return game, ActionReader(game.action_space, self.actions)


class TextArenaSettings(GameSettings):
    """Settings of a single-player game of TextArena."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that TextArena is installed and that the game can start."""
        del config
        if missing := list(missing_library("the environment textarena", "textarena", "textarena")):
            yield from missing
            return
        state = random.getstate()  # games draw from the global generator
        try:
            self.open_game(0)
        except ConfigError as error:
            yield str(error)
        finally:
            random.setstate(state)

    def open_game(self, seed: int) -> Any:
        """Create the game and start it.

        Raises:
            ConfigError: TextArena is not installed or has no such game, or the game rejects its arguments or lacks
                data.
        """
        library = load_library("the environment textarena", "textarena", "textarena")
        if self.id not in library.envs.registration.ENV_REGISTRY:
            raise ConfigError(f"textarena has no game '{self.id}'", hints=["write an id such as GuessTheNumber-v0"])
        try:
            game = library.make(self.id, **self.arguments)
            game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ConfigError(f"the game '{self.id}' of textarena is not a single-player game: {error}") from error
        except Exception as error:
            if isinstance(error, LookupError) and "nltk" in str(error).lower():
                raise ConfigError(
                    f"the game '{self.id}' of textarena needs data of nltk, which is not on this machine",
                    hints=["run python -m nltk.downloader words averaged_perceptron_tagger_eng on every worker's node"],
                ) from error
            raise ConfigError(
                f"textarena cannot start the game '{self.id}': {type(error).__name__}: {error}",
                hints=["arguments are those of the game's class"],
            ) from error
        return game
