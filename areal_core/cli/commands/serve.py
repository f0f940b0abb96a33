"""Start an inference server of a config's kind, and let it join a run in progress.

    areal serve --join RUN_DIR           a further server for this run, of the run's own config
    areal serve CONFIG                   a server by itself; name its address in inference_engine.addresses

Ctrl-C takes the server out: it ends when the run has let go of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.request import add_request_arguments, read_request
from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse

SUMMARY = "start an inference server, for a run in progress or by itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal serve`."""
    add_request_arguments(parser)
    parser.add_argument("--join", metavar="RUN_DIR", type=Path, help="the run that the server shall join")
    parser.add_argument("--name", help="of the server in logs and in the live view; by default one is made")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; another than loopback needs a key")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--gpus", type=numbers, help="GPUs that it may use, such as 2,3")


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
    from areal_core.inference.serve import serve

    placement = {"host": arguments.host, "port": arguments.port, "gpus": arguments.gpus}
    return serve(resolved, arguments.join, name=arguments.name, **placement)


def numbers(text: str) -> list[int]:
    """Return the numbers in a text such as `0,1`. argparse shows the name of this function in its errors."""
    return [int(number) for number in text.split(",")]
