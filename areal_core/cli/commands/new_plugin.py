"""Write the folder `areal-NAME` with a plugin of your own: its code, its tests, and workflows for CI and a release."""

import argparse

from areal_core.cli.new_plugin import KINDS, write_plugin
from areal_core.cli.output import print_out

SUMMARY = "begin a plugin of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal new-plugin`."""
    parser.add_argument("name", metavar="NAME", help="of the plugin, such as shortest")
    parser.add_argument("--kind", action="append", choices=KINDS, help="what it supplies; repeat it; default: reward")


def execute(arguments: argparse.Namespace) -> int:
    """Write the plugin, and print its files and the next commands. Return the exit code."""
    print_out(write_plugin(arguments.name, arguments.kind or ["reward"]))
    return 0
