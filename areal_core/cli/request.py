"""The words that several commands share: which config is meant, and a folder that is to be made."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


class Request(NamedTuple):
    """What the command line asks for: a config or preset, overrides (files too), and plugins."""

    config: str | None
    overrides: list[str]
    plugins: list[str]


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CONFIG, overrides and --plugins."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a YAML file, or a preset as PLUGIN/NAME; without it, the first default preset of --plugins",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="set a YAML value: rewards.0.weight=2 reaches into a list, key=null clears; a file sets all that it holds",
    )
    parser.add_argument("--plugins", action="append", default=[], metavar="A,B", help="load these plugins as well")


def read_request(arguments: argparse.Namespace) -> Request:
    """Sort the words: the first without `=` is CONFIG, and what lies over it may stand anywhere."""
    words = [word for word in (arguments.config, *arguments.overrides) if word is not None]
    config = next((word for word in words if "=" not in word), None)
    plugins = [name for group in arguments.plugins for name in group.replace(",", " ").split()]
    return Request(config, [word for word in words if word is not config], plugins)


def require_folder(folder: Path) -> None:
    """Raise `UsageError` where there is no folder."""
    if not folder.is_dir():
        no = "there is no run folder"
        raise UsageError(f"{folder} is a file, and no run folder" if folder.exists() else f"{no} {folder}")


def require_place(what: str, folder: Path, hint: str) -> None:
    """Raise `UsageError` where a folder cannot be made; nothing is left of the attempt."""
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                made.append(path)
    except OSError as error:
        raise UsageError(f"{what} {folder} cannot be made: {error.strerror}", hints=[hint]) from None
    finally:
        with suppress(OSError):  # another program has put something into one of them meanwhile
            for path in reversed(made):
                path.rmdir()
