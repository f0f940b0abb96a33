"""Convert one of AReaL's GRPO or PPO configs to an areal config.

Comments at the end of the new config list every key that AReaL sets by default or that was not converted, and why.
Standard error gets a summary of them.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal_convert.convert import account, convert
from areal_convert.source import Source, read
from areal_core.errors import UsageError
from areal_core.programs import print_error, print_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="areal convert", description=__doc__)
    parser.add_argument("framework", choices=["areal"], help="framework that the config was written for")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the YAML file to convert")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="file to write the config to (default: standard output)"
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=_count,
        help="number of rows of the training data, to convert AReaL's epochs to areal's steps",
    )
    parser.add_argument("--json", action="store_true", help="print the config and the outcome of each key as JSON")
    arguments = parser.parse_args(words)
    source = Source(read(arguments.config), arguments.rows)
    found = {"config": convert(source), **account(source)}
    text = json.dumps(found, indent=2, default=str) if arguments.json else _yaml(arguments.config.name, found)
    try:
        if arguments.output:
            with arguments.output.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        else:
            print_out(text)
    except OSError as error:
        raise UsageError(f"{arguments.output} cannot be written: {error.strerror}") from error
    counts = ", ".join(f"{len(keys)} {part.replace('_', ' ')}" for part, keys in found.items() if part != "config")
    print_error("\n".join([f"keys of {arguments.config}: {counts}", *_lines(found, "by_default", "lost")]))
    return 0


def _count(word: str) -> int:
    """A number above 0, of the command line."""
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word} is no number above 0")
    return int(word)


def _yaml(name: str, found: dict[str, dict[str, Any]]) -> str:
    text = yaml.safe_dump(found["config"], sort_keys=False, width=116, default_flow_style=None)
    head = f"# From AReaL's {name}. Look at workflow and rewards, which AReaL has in a script."
    lines = _lines(found, "by_default", "lost", "not_needed")
    comments = [textwrap.fill(line, 116, initial_indent="# ", subsequent_indent="#   ") for line in lines]
    return "\n".join([head, text, *comments])


def _lines(found: dict[str, dict[str, Any]], *parts: str) -> Iterator[str]:
    """Key by key what became of it; keys of which the same is to be said together."""
    for part in parts:
        for words in dict.fromkeys(found[part].values()):
            keys = ", ".join(key for key, said in found[part].items() if said == words)
            yield f"{part.replace('_', ' ')}: {keys} - {words}"
