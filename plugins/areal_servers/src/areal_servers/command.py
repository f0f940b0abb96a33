"""Start an inference server of a config's kind, and let it join a run in progress.

    areal serve --run RUN_DIR            a further server for this run, of the run's own config
    areal serve CONFIG                   a server by itself; name its address in inference_engine.addresses

Ctrl-C takes the server out: it ends when the run has let go of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.request import add_request_arguments, read_request
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return execute(parser.parse_intermixed_args(words))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal serve`."""
    add_request_arguments(parser)
    parser.add_argument("--run", metavar="RUN_DIR", type=Path, help="the run that the server shall join")
    parser.add_argument("--name", help="of the server in logs and in the live view; by default one is made")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; another than loopback needs a key")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    parser.add_argument("--gpus", help="GPUs that it may use, such as 2,3")


def execute(arguments: argparse.Namespace) -> int:
    """Resolve the config and hand it over."""
    request = read_request(arguments)
    from areal_core.config import load_run, resolve

    if arguments.run is not None:
        if not (arguments.run / "config.yaml").is_file():
            raise UsageError(f"there is no run in {arguments.run}: it holds no config.yaml")
        if request.config is not None:
            raise UsageError("--run takes the config from the run, so CONFIG cannot be named as well")
        resolved = load_run(arguments.run, request.overrides, request.plugins)
    else:
        resolved = resolve(request.config, request.plugins, request.overrides)
    try:
        gpus = [int(number) for number in arguments.gpus.split(",")] if arguments.gpus else None
    except ValueError:
        raise UsageError(f"--gpus {arguments.gpus}: write numbers with commas between them, such as 0,1") from None
    from areal_servers.serve import serve

    return serve(resolved, arguments.run, name=arguments.name, host=arguments.host, port=arguments.port, gpus=gpus)
