"""Arguments that several commands share: a config with overrides, and folders that must or must not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


class Request(NamedTuple):
    """The config that a command line names.

    Attributes:
        config: a YAML file or a preset; None if the command line names none.
        overrides: `section.key=value`, and paths of YAML files.
        plugins: names of plugins in `--plugins`.

    Example:
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import Request
        >>> request = Request("grpo/addition", overrides=["steps=20"], plugins=[])
        >>> resolve(request.config, request.plugins, request.overrides).config.steps
        20
    """

    config: str | None
    overrides: list[str]
    plugins: list[str]


def add_request_arguments(
    parser: argparse.ArgumentParser, *, default_config: str = "the first default preset of --plugins"
) -> None:
    """Declare CONFIG, overrides and --plugins.

    Args:
        parser: gets the arguments.
        default_config: which config the command uses if the command line names none, for the help.
    """
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help=f"a YAML file, or a preset as PLUGIN/NAME (default: {default_config})",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="set a value, written as YAML: rewards.0.weight=2 reaches into a list, key=null clears a key; a "
        "further YAML file sets all values in it",
    )
    parser.add_argument(
        "--plugins",
        action="append",
        default=[],
        metavar="A,B",
        help="load these plugins in addition to those that the config names",
    )


def read_request(arguments: argparse.Namespace) -> Request:
    """Return the request: the first argument without `=` is CONFIG, all others are overrides, in any order.

    Example:
        >>> import argparse
        >>> from areal_core.programs import add_request_arguments, read_request
        >>> parser = argparse.ArgumentParser()
        >>> add_request_arguments(parser)
        >>> read_request(parser.parse_intermixed_args(["math.yaml", "steps=20", "--plugins", "grpo,hf"]))
        Request(config='math.yaml', overrides=['steps=20'], plugins=['grpo', 'hf'])
    """
    values = [value for value in (arguments.config, *arguments.overrides) if value is not None]
    config = next((value for value in values if "=" not in value), None)
    plugins = [name for group in arguments.plugins for name in group.replace(",", " ").split()]
    return Request(config, [value for value in values if value is not config], plugins)


def require_folder(folder: Path) -> None:
    """Raise `UsageError` if a folder does not exist."""
    if folder.is_dir():
        return
    if folder.exists():
        raise UsageError(f"{folder} is a file, and no run folder")
    raise UsageError(f"there is no run folder {folder}")
