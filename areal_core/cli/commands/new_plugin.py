"""Write the folder `areal-NAME` with a new plugin: its code, its tests, and workflows for CI and a release."""

import argparse

from areal_core.cli.new_plugin import KINDS, write_plugin
from areal_core.cli.output import print_out

SUMMARY = "write the files of a new plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal new-plugin`."""
    parser.add_argument("name", metavar="NAME", help="name of the plugin, such as shortest")
    parser.add_argument(
        "--kind",
        action="append",
        choices=KINDS,
        help="kind of component that the plugin supplies; repeat it for more (default: reward)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Write the plugin, and print its files and the next commands. Return the exit code."""
    print_out(write_plugin(arguments.name, arguments.kind or ["reward"]))
    return 0
