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


def main(argv: Sequence[str]) -> int:
    """Run `areal convert` with these arguments and return its exit code."""
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
    arguments = parser.parse_args(argv)
    source = Source(read(arguments.config), arguments.rows)
    outcome = {"config": convert(source), **account(source)}
    text = json.dumps(outcome, indent=2, default=str) if arguments.json else _yaml(arguments.config.name, outcome)
    try:
        if arguments.output:
            with arguments.output.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        else:
            print_out(text)
    except OSError as error:
        raise UsageError(f"{arguments.output} cannot be written: {error.strerror}") from error
    counts = ", ".join(f"{len(keys)} {part.replace('_', ' ')}" for part, keys in outcome.items() if part != "config")
    print_error("\n".join([f"keys of {arguments.config}: {counts}", *_lines(outcome, "by_default", "lost")]))
    return 0


def _count(text: str) -> int:
    """Parse a positive integer of the command line."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def _yaml(name: str, outcome: dict[str, dict[str, Any]]) -> str:
    text = yaml.safe_dump(outcome["config"], sort_keys=False, width=116, default_flow_style=None)
    head = f"# Converted from AReaL's {name}. Check workflow and rewards, which AReaL defines in a script."
    lines = _lines(outcome, "by_default", "lost", "not_needed")
    comments = [textwrap.fill(line, 116, initial_indent="# ", subsequent_indent="#   ") for line in lines]
    return "\n".join([head, text, *comments])


def _lines(outcome: dict[str, dict[str, Any]], *parts: str) -> Iterator[str]:
    """Yield a line for each reason, with all keys that share it."""
    for part in parts:
        for reason in dict.fromkeys(outcome[part].values()):
            keys = ", ".join(key for key, other in outcome[part].items() if other == reason)
            yield f"{part.replace('_', ' ')}: {keys} - {reason}"
