"""Serve a model to clients of the Tinker API, so that they train it with loops of their own.

A client sets TINKER_BASE_URL to this server's address and TINKER_API_KEY to its key (any text that begins with tml- if
the server has none). The server survives kill -9: start it again with the same --run-dir, and its clients continue.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.errors import UsageError
from areal_core.programs import add_request_arguments, read_request, require_place

if TYPE_CHECKING:
    from collections.abc import Sequence

PRESET: Final = "tinker/server"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def main(arguments: Sequence[str]) -> int:
    """Run `areal tinker serve` with these arguments and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal tinker serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return execute(parser.parse_intermixed_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `areal tinker serve` to a parser."""
    add_request_arguments(parser, default_config=PRESET)
    add = parser.add_argument
    add("--model", metavar="MODEL", help="base model: a folder or a name on the hub (model.path of the config)")
    add("--name", metavar="NAME", default="", help="name of the model for clients (default: MODEL)")
    add("--full", action="store_true", help="train all parameters, not an adapter (train_engine.adapter=null)")
    add("--placement", metavar="WORDS", help='GPUs, such as "train=1 generate=tp1x1 colocated" (placement)')
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    key = "environment variable with the key of clients, a text that begins with tml- (default: AREAL_TINKER_KEY)"
    add("--key-variable", metavar="NAME", default="AREAL_TINKER_KEY", help=key)
    add(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="folder of checkpoints and logs; that of an earlier server is continued (default: runs/tinker-TIME)",
    )
    state = "seconds of training after which a model's state is saved: what a restart repeats at most (default: 60)"
    add("--save-every", metavar="S", type=float, default=60.0, help=state)


def _require_port(host: str, port: int) -> None:
    """Raise `UsageError` if another program listens there, or this machine does not have the address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        hint = "choose another with --port, or --host for another address of this machine"
        raise UsageError(f"the server cannot listen on {host}:{port}: {error}", hints=[hint]) from None


def execute(arguments: argparse.Namespace) -> int:
    """Check the arguments and serve until an interrupt. Return the exit code.

    Raises:
        UsageError: an argument is invalid.
        ConfigError: the config is wrong.
        RunError: the server cannot start.
    """
    from areal_core.config import resolve
    from areal_tinker.serve import serve
    from areal_tinker.service import Options

    variable = arguments.key_variable if os.environ.get(arguments.key_variable) else ""
    if arguments.host not in LOOPBACK and not variable:
        raise UsageError(
            f"a server on {arguments.host} can be reached by others, and has no key",
            hints=[f"set the environment variable {arguments.key_variable} to a text that begins with tml-"],
        )
    if variable and not os.environ[variable].startswith("tml-"):
        raise UsageError(f"the key in {variable} must begin with tml-, because the SDK refuses others")
    _require_port(arguments.host, arguments.port)
    request = read_request(arguments)
    overrides = [*request.overrides]
    if arguments.model is not None:
        overrides.append(f"model.path={arguments.model}")
    if arguments.placement is not None:
        overrides.append(f"placement={arguments.placement}")
    if arguments.full:
        overrides.append("train_engine.adapter=null")
    resolved = resolve(request.config or PRESET, request.plugins, overrides, imports=True)
    folder = arguments.run_dir or Path("runs") / f"tinker-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    require_place("the folder", folder.resolve(), "name another: --run-dir DIR")
    options = Options(arguments.host, arguments.port, arguments.name, variable, arguments.save_every)
    return serve(resolved, folder.resolve(), options)
