"""Settings of workflows with tools and of environments. Imports no torch and none of the libraries they need."""

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
            f"names {', '.join(unknown)}: there are {{observation}} and {{actions}}; a brace is written {{{{"
        )
    return template


Template = Annotated[str, AfterValidator(_readable_template)]


class McpServerSettings(Settings):
    """A server of the Model Context Protocol: a command, or an address."""

    command: list[str] | None = Field(
        default=None, min_length=1, description="program and arguments, which speaks on its standard input and output"
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="variables for it, beside HOME, PATH and the like; secrets as env:NAME",
    )
    folder: LocalPath = Field(default=Path(), validate_default=True, description="that it starts in; the config's own")
    url: str | None = Field(default=None, pattern=r"^https?://", description="of one that runs, with its path")
    per: Literal["worker", "episode"] = Field(
        default="worker", description="whether all episodes of a worker share it, or each has one of its own"
    )
    start_timeout_s: Seconds = Field(default=60.0, gt=0, description="until it has told its tools")

    @model_validator(mode="after")
    def _one_of_two(self) -> McpServerSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("write either command or url")
        return self

    @property
    def title(self) -> str:
        """Which server it is, for messages."""
        return self.url or " ".join(self.command or ())


class ToolSettings(ConversationSettings):
    """A conversation in which the policy calls functions of Python, or tools of servers."""

    prompt_key: str = Field(default="prompt", description="the row's key that holds the task: text or messages")
    system: str | None = Field(default=None, description="system message for rows that have none of their own")
    tools: list[Selection] = component("tools", default=[], description="typed functions that the policy may call")
    mcp: list[McpServerSettings] = Field(
        default_factory=list, description="servers of the Model Context Protocol, whose tools are added"
    )
    max_turns: int = Field(default=8, ge=1, description="answers of the policy in one episode")
    tool_timeout_s: Seconds = Field(default=30.0, gt=0, description="for one call of a tool")
    longest_result: int = Field(default=4000, ge=1, description="characters of a result; what is longer is cut")

    def check(self, config: RunConfig) -> Iterable[str]:
        """There must be a tool; the programs and the library of servers must be here."""
        if not self.tools and not self.mcp:
            yield "tools: name at least one, or a server in mcp; without tools use core/single_turn"
        if self.mcp:
            yield from missing_library("tools of mcp", "mcp", "mcp")
        for server in self.mcp:
            if server.command:
                yield from missing_program(server.command[0], server.folder, server.environment, config, "mcp")

    @property
    def prompt(self) -> PromptSettings:
        """How a row becomes the opening of a conversation. The tools are those of the workflow, not of the row."""
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
    """Rows that are nothing but seeds."""

    size: int = Field(ge=1, description="how many")
    first: int = Field(default=0, ge=0, description="the first one; leave a distance between training and evaluation")


class GameSettings(Settings):
    """What games of libraries have."""

    id: str = Field(min_length=1, description="the game's name in its library")
    arguments: dict[str, Any] = Field(default_factory=dict, description="of the game, by keyword")
    max_steps: int | None = Field(default=None, ge=1, description="turns of the policy; null leaves it to the game")
    seed_key: str = Field(
        default="seed", description="the row's key that holds the game's seed; without it one follows from the row"
    )


class GymnasiumSettings(GameSettings):
    """A game of gymnasium, in words."""

    system: str | None = Field(default=None, description="system message in front")
    opening: Template = Field(default="{observation}\n\nSay {actions}.", description="what the policy hears first")
    turn: Template = Field(default="{observation}", description="what it hears after each of its turns")
    observation: Literal["value", "rendering"] = Field(
        default="value", description="the value in words, or what the game renders as text (render_mode: ansi)"
    )
    describe: Selection | None = component(
        "tools", description="a function of yours from an observation to a text, mine.py:describe"
    )
    actions: dict[str, Any] = Field(
        default_factory=dict, description="names of actions, {left: 0, right: 2}; without them numbers are read"
    )
    invalid_reward: float = Field(
        default=-0.1, allow_inf_nan=False, description="of a turn that names no action; the game does not see it"
    )
    step_timeout_s: Seconds = Field(default=60.0, gt=0, description="for the game to answer one turn")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there, and the game must open."""
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
        """A game of its own, and what reads its actions.

        Raises:
            ConfigError: gymnasium is not installed, has no such game, or the game takes no such arguments or actions.
        """
        as_text = {"render_mode": "ansi"} if self.observation == "rendering" else {}
        try:
            game = load_gymnasium().make(self.id, **(self.arguments | as_text))
        except Exception as error:
            raise ConfigError(
                f"gymnasium cannot make the game '{self.id}': {type(error).__name__}: {error}",
                hints=[
                    "id is its name, with `module:` in front where a module registers it; arguments are those of make"
                ],
            ) from error
        return game, ActionReader(game.action_space, self.actions)


class TextArenaSettings(GameSettings):
    """A game of TextArena for one player."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there, and the game must begin."""
        del config
        if missing := list(missing_library("the environment textarena", "textarena", "textarena")):
            yield from missing
            return
        others = random.getstate()  # games draw from the generator of this module
        try:
            self.open_game(0)
        except ConfigError as error:
            yield str(error)
        finally:
            random.setstate(others)

    def open_game(self, seed: int) -> Any:
        """A game of its own that has begun.

        Raises:
            ConfigError: TextArena is not installed, has no such game, or the game refuses its arguments or lacks data.
        """
        library = load_library("the environment textarena", "textarena", "textarena")
        if self.id not in library.envs.registration.ENV_REGISTRY:
            raise ConfigError(f"textarena has no game '{self.id}'", hints=["ids are such as GuessTheNumber-v0"])
        try:
            game = library.make(self.id, **self.arguments)
            game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise ConfigError(f"the game '{self.id}' of textarena is not for one player: {error}") from error
        except Exception as error:
            if isinstance(error, LookupError) and "nltk" in str(error).lower():
                raise ConfigError(
                    f"the game '{self.id}' of textarena needs data of nltk, which is not on this machine",
                    hints=["python -m nltk.downloader words averaged_perceptron_tagger_eng, wherever workers run"],
                ) from error
            raise ConfigError(
                f"textarena cannot begin the game '{self.id}': {type(error).__name__}: {error}",
                hints=["arguments are those of the game's class"],
            ) from error
        return game


class OpenEnvSettings(Settings):
    """An environment behind a server of OpenEnv."""

    url: str = Field(pattern=r"^(https?|wss?)://", description="of the server; one session of it for each episode")
    reset_keys: list[str] = Field(
        default_factory=list, description="the row's keys that are handed to the environment's reset, such as seed"
    )
    action: dict[str, Any] = Field(default_factory=dict, description="what each action holds beside the completion")
    action_key: str = Field(default="message", description="of an action: what holds the completion")
    observation_key: str | None = Field(
        default=None, description="of an observation: its text; null for all of it, as JSON"
    )
    opening_key: str | None = Field(
        default=None, description="the row's key with what the policy hears first; null for the first observation"
    )
    connect_timeout_s: Seconds = Field(default=30.0, gt=0, description="to reach the server and have a session")
    step_timeout_s: Seconds = Field(default=60.0, gt=0, description="for one answer of the environment")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        del config
        return missing_library("the environment openenv", "openenv", "openenv")
