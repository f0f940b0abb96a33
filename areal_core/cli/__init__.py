"""Run the `areal` command. Each file in `commands` is one command.

The program starts fast, because it imports only argparse before it runs the command: no torch, no pydantic, no pluggy,
and no scan of installed packages. If the first argument is not a command of the core, it is the name of a plugin
(`areal PLUGIN COMMAND ...`) or of a command that only one plugin has (`areal COMMAND ...`).
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
    """Run the program.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 if done, 1 if it failed, 2 if the request was wrong. After a signal, 128 plus its number: 130
        for Ctrl-C, 143 for SIGTERM, and 129 if the terminal was closed.
    """
    _open_standard_streams()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP: `check_system` reports Windows in a sentence
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, _interrupt)
    arguments = list(sys.argv[1:] if argv is None else argv)
    bypass_proxies()
    try:
        return _dispatch(arguments)
    except ArealError as error:
        if "--debug" in arguments:
            raise
        print_error(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print_error("interrupted")
        return 128 + int((*interrupt.args, signal.SIGINT)[0])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2


def _open_standard_streams() -> None:
    """Redirect closed streams (`>&-`) to /dev/null.

    Python has None for a closed stream, and the next file that a program opens would get the stream's number.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the stream was closed: keep /dev/null in its place
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def command_names() -> list[str]:
    """Return the names of the core's commands: the files in the folder `commands`, with `-` for `_`."""
    return sorted(path.stem.replace("_", "-") for path in Path(__file__).parent.glob("commands/[a-z]*.py"))


def build_parser() -> argparse.ArgumentParser:
    """Return a parser with all commands of the core. `areal --help` and the reference page use it."""
    parser = argparse.ArgumentParser(
        prog="areal",
        description="Asynchronous reinforcement learning for language models.",
        epilog="Plugins supply further commands; areal plugins lists them. areal PLUGIN COMMAND ... runs one; "
        "areal COMMAND ... is enough if only one plugin has a command with that name.",
    )
    parser.add_argument("--version", action="version", version=f"areal {areal_core.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in command_names():
        module = _command(name)
        _add_arguments(commands.add_parser(name, help=module.SUMMARY, description=module.__doc__), module)
    return parser


def _dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names, and return its exit code."""
    if not arguments or arguments[0].startswith("-"):
        parser = build_parser()
        parser.parse_args(arguments)
        parser.print_help()
        return 2
    is_core_command = arguments[0] in command_names()
    if not (is_core_command and {"-h", "--help"} & set(arguments)):  # their help works on every operating system
        from areal_core.cli.system import check_system

        check_system()
    if is_core_command:
        module = _command(arguments[0])
        parser = argparse.ArgumentParser(prog=f"areal {arguments[0]}", description=module.__doc__)
        _add_arguments(parser, module)
        return int(module.execute(parser.parse_intermixed_args(arguments[1:])))
    from areal_core.cli.plugin_command import run_plugin_command

    return run_plugin_command(arguments[0], arguments[1:], command_names())


def _interrupt(number: int, frame: object) -> None:
    """Raise `KeyboardInterrupt`, as Ctrl-C does, so that the program removes its temporary files."""
    raise KeyboardInterrupt(number)


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"areal_core.cli.commands.{name.replace('-', '_')}")


def _add_arguments(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
