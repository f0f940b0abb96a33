"""`areal run` for the commands of plugins, which start it in their process: on a node of a cluster, or as a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal run`."""
    from areal_core.cli.commands import run

    run.add_arguments(parser)


def execute_run(arguments: argparse.Namespace) -> int:
    """Do what `areal run` does with its arguments, in this process. Return the exit code.

    Args:
        arguments: of a parser with `add_run_arguments`.

    Raises:
        ArealError: the request was wrong, or the run failed.
    """
    from areal_core.cli.commands import run

    return run.execute(arguments)
