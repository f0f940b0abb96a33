"""The `areal` command. Each file in `commands` is one command; nothing is imported that the words do not ask for.

Until a command runs, only argparse is imported: no torch, no pydantic, no pluggy, no scan of installed packages. A
word that is no command of the core is the name of a plugin, `areal PLUGIN COMMAND ...`, or of a command that only one
plugin has, `areal COMMAND ...`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import areal_core
from areal_core.cli.output import print_error
from areal_core.errors import ArealError
from areal_core.proxies import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0 done, 1 it failed, 2 the request was wrong.

    What a signal has ended returns 128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for
    a terminal that was closed.
    """
    _open_standard_streams()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP: `check_system` reports Windows in a sentence
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, _interrupt)
    words = list(sys.argv[1:] if argv is None else argv)
    bypass_proxies()
    try:
        return _dispatch(words)
    except ArealError as error:
        if "--debug" in words:
            raise
        print_error(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print_error("interrupted")
        return 128 + int((*interrupt.args, signal.SIGINT)[0])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2


def _open_standard_streams() -> None:
    """Redirect closed streams (`>&-`) to /dev/null: Python has None for them, and the next file gets their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # it stays
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def command_names() -> list[str]:
    """The commands of the core: the files in the folder `commands`, `_` read as `-`."""
    return sorted(path.stem.replace("_", "-") for path in Path(__file__).parent.glob("commands/[a-z]*.py"))


def build_parser() -> argparse.ArgumentParser:
    """The parser of everything, from which the help is made."""
    parser = argparse.ArgumentParser(
        prog="areal",
        description="Asynchronous reinforcement learning for language models.",
        epilog="Plugins bring further commands; areal plugins lists them. areal PLUGIN COMMAND ... runs one, and areal "
        "COMMAND ... does where only one plugin has a command of that name.",
    )
    parser.add_argument("--version", action="version", version=f"areal {areal_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in command_names():
        module = _command(name)
        _fill(commands.add_parser(name, help=module.SUMMARY, description=module.__doc__), module)
    return parser


def _dispatch(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        parser = build_parser()
        parser.parse_args(words)
        parser.print_help()
        return 2
    is_core_command = words[0] in command_names()
    if not (is_core_command and {"-h", "--help"} & set(words)):  # the help of the core's commands works everywhere
        from areal_core.cli.system import check_system

        check_system()
    if is_core_command:
        module = _command(words[0])
        parser = argparse.ArgumentParser(prog=f"areal {words[0]}", description=module.__doc__)
        _fill(parser, module)
        return int(module.execute(parser.parse_intermixed_args(words[1:])))
    from areal_core.cli.plugin_command import run_plugin_command

    return run_plugin_command(words[0], words[1:], command_names())


def _interrupt(number: int, frame: object) -> None:
    """End as Ctrl-C does, so that nothing temporary is left."""
    raise KeyboardInterrupt(number)


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"areal_core.cli.commands.{name.replace('-', '_')}")


def _fill(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
