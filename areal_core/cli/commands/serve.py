"""Start an inference server of the kind that a config names, and let it join a run in progress.

    areal serve --join RUN_DIR           a further server for this run, with the run's own config
    areal serve CONFIG                   a standalone server; add its address to inference_engine.addresses

After Ctrl-C the server leaves the run, and exits when the run has released it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.request import add_request_arguments, read_request
from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse

SUMMARY = "start an inference server, for a run in progress or standalone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal serve`."""
    add_request_arguments(parser)
    parser.add_argument("--join", metavar="RUN_DIR", type=Path, help="folder of the run that the server joins")
    parser.add_argument("--name", help="name of the server in logs and in the live view (default: a generated name)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any address other than loopback needs an API key (default: 127.0.0.1)",
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 chooses a free port (default: 0)")
    parser.add_argument("--gpus", type=numbers, help="GPUs that the server may use, such as 2,3")


def execute(arguments: argparse.Namespace) -> int:
    """Resolve the config and run the server. Return the exit code."""
    request = read_request(arguments)
    from areal_core.config import load_run, resolve

    if arguments.join is None:
        from areal_core.checks.reading import read_settings

        resolved = resolve(request.config, request.plugins, request.overrides)
        read_settings(resolved)
    elif request.config is not None:
        raise UsageError("--join takes the config from the run, so CONFIG cannot be named as well")
    else:
        resolved = load_run(arguments.join, request.overrides, request.plugins)
    from areal_core.driver.serve import serve

    placement = {"host": arguments.host, "port": arguments.port, "gpus": arguments.gpus}
    return serve(resolved, arguments.join, name=arguments.name, **placement)


def numbers(text: str) -> list[int]:
    """Return the numbers in a text such as `0,1`. argparse shows the name of this function in its errors."""
    return [int(number) for number in text.split(",")]
