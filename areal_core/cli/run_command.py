"""Run `areal run` in the process of a plugin's command, for example on a node of a cluster or in a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal run`."""
    from areal_core.cli.commands import run

    run.add_arguments(parser)


def execute_run(arguments: argparse.Namespace) -> int:
    """Do in this process what `areal run` does, and return the exit code.

    Args:
        arguments: arguments that a parser with `add_run_arguments` has parsed.

    Raises:
        ArealError: the request was wrong, or the run failed.

    Example:
        >>> import argparse
        >>> from areal_core.errors import UsageError
        >>> from areal_core.programs import add_run_arguments, execute_run
        >>> parser = argparse.ArgumentParser()
        >>> add_run_arguments(parser)
        >>> arguments = parser.parse_intermixed_args(["no-such.yaml"])
        >>> try:
        ...     execute_run(arguments)
        ... except UsageError as error:
        ...     print(error.message)
        there is no config file no-such.yaml
    """
    from areal_core.cli.commands import run

    return run.execute(arguments)
