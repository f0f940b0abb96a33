"""`commands.md`: every command of the core and of areal's plugins, from their argument parsers."""

from __future__ import annotations

import argparse
import importlib
import re
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from areal_core.cli import build_parser
from areal_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Iterable

INTRODUCTION: Final = """# Commands

`areal --help` lists the commands. The commands of a plugin are `areal PLUGIN COMMAND`; `areal COMMAND` is enough where
only one plugin has it. Results go to standard output, errors and warnings to standard error.

`CONFIG` is a YAML file or a preset as `PLUGIN/NAME`. `section.key=value` sets one value and may stand anywhere among
the arguments.

| exit code | means |
|---|---|
| 0 | done, or the answer is yes |
| 1 | it failed, or the answer is no (`audit`, `config check`, `doctor`, `plugins NAME`, `status`) |
| 2 | the request is wrong: an unknown argument, a mistake in the config, a missing plugin; nothing was started |
| 129, 130, 138, 143 | interrupted by SIGHUP, Ctrl-C, SIGUSR1, SIGTERM: 128 + the signal; you can resume the run |"""


class _FoundError(Exception):
    """Carries a parser out of a command that was about to use it."""


def page(plugins: Iterable[str]) -> str:
    """The whole page, with the commands of these plugins."""
    (commands,) = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    parsers = {name: parser for name, parser in commands.choices.items() if isinstance(name, str)}
    records = [record for kind, record in PluginManager.load(plugins).records() if kind == "commands"]
    names = [*parsers, *(record.name for record in records)]
    for record in records:
        short = names.count(record.name) == 1
        parsers[record.name if short else f"{record.plugin} {record.name}"] = _parser(record.target)
    parts = [INTRODUCTION, "\n".join(f"- [`areal {name}`](#areal-{name.replace(' ', '-')})" for name in parsers)]
    for name, parser in parsers.items():
        parts += _described(name, parser)
    return "\n\n".join(parts)


def _parser(target: str) -> argparse.ArgumentParser:
    """The parser that a plugin's command makes when it is called."""
    module, _, attribute = target.partition(":")
    main = getattr(importlib.import_module(module), attribute)

    def give(self: argparse.ArgumentParser, *_: object) -> None:
        raise _FoundError(self)

    with patch.multiple(argparse.ArgumentParser, parse_args=give, parse_intermixed_args=give):
        try:
            main([])
        except _FoundError as found:
            return found.args[0]
    raise LookupError(f"{target} has no argument parser")


def _described(name: str, parser: argparse.ArgumentParser) -> Iterable[str]:
    yield f"## areal {name}"
    words = (parser.description or "").strip()
    # Aligned lines stay aligned.
    yield f"```text\n{words}\n```" if re.search(r"^\w+ {2,}", words, re.MULTILINE) else words
    rows = ["| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
        takes = "" if action.nargs == 0 else f" {value}"
        written = ", ".join(f"`{option}{takes}`" for option in action.option_strings) or f"`{value}`"
        meaning = (action.help or "") % {"default": action.default} if action.help else ""
        rows.append(f"| {written.replace('|', chr(92) + '|')} | {meaning.replace('|', chr(92) + '|')} |")
    yield "\n".join(rows)
