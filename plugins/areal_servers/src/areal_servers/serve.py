"""A server that is started by hand: what `areal serve` calls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError, UsageError
from areal_core.interfaces.launcher import Needs
from areal_core.launchers.keepers import Keepers
from areal_core.launchers.launched import LaunchedProcess
from areal_core.runs import RunFolder, model_reference
from areal_servers.connection import ServerConnection
from areal_servers.errors import RequestRefusedError, ServerLostError
from areal_servers.joining import INTERVAL_S, Joining
from areal_servers.settings import LOOPBACK, FleetSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_servers.fleet import ServerFleet
    from areal_servers.interface import ServerCommand


def serve(
    resolved: Resolved, run_dir: Path | None, *, name: str | None, host: str, port: int, gpus: Sequence[int] | None
) -> int:
    """Start a server, have it join the run, and keep it until somebody interrupts.

    Args:
        resolved: the config whose `inference_engine` and `model` are served.
        run_dir: of the run that it joins; None for a server by itself.
        name: of the server.
        host, port: where it listens; port 0 is any free one.
        gpus: that it sees.

    Returns:
        0 after an interruption.

    Raises:
        UsageError: the config's engine is no server, or would listen openly without a key.
        RunError: the server ended by itself, or the run will not use it.
    """
    chosen = resolved.config.inference_engine
    if chosen is None or not isinstance(chosen.settings, FleetSettings):
        told = "no inference engine" if chosen is None else f"'{chosen.reference}', which runs inside of the run"
        raise UsageError(
            f"{resolved.name} has {told}: there is no server to start",
            hints=["choose one with inference_engine=sglang or vllm"],
        )
    run = RunFolder(run_dir or Path(tempfile.mkdtemp(prefix="areal-serve-")))
    fleet: ServerFleet = chosen.build(log_dir=run.logs)
    if host not in LOOPBACK and not fleet.settings.key:
        raise UsageError(
            f"a server on {host} can be reached by others, and has no key",
            hints=["set inference_engine.api_key=env:NAME, here and in the run"],
        )
    if resolved.config.model.source is not None and not run.model_note.is_file():
        hint = "try again when the run trains" if run_dir else "name a folder with model.path, or use --run"
        raise UsageError("the model is made when a run starts, and is not there yet", hints=[hint])
    name = name or f"added-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    model = model_reference(resolved, run)
    needs = Needs(gpus=None if gpus is None else tuple(gpus))
    server = LaunchedProcess(Keepers(run.logs, adopts_orphans=True), name, needs, fleet.settings.key)
    port = port or asyncio.run(server.find_place()).port
    address = f"http://{host}:{port}"
    joining = None if run_dir is None else Joining(run, name, address, _say)
    _say(f"starting {fleet.adapter.name} of {model.path} at {address}; log: {run.log(name)}; Ctrl-C ends it")
    asyncio.run(_serve(fleet, fleet.adapter.command(model, host, port), server, address, joining))
    return 0


async def _serve(
    fleet: ServerFleet, command: ServerCommand, server: LaunchedProcess, address: str, joining: Joining | None
) -> None:
    """Until somebody interrupts."""
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    if joining is not None:
        await joining.renew()  # a name that is taken is told before anything is started
    await server.start("server", command.arguments, command.environment)
    connection = ServerConnection(address, fleet.settings.key)
    is_ready, deadline = joining is not None, time.monotonic() + fleet.settings.start_timeout_s
    try:
        while not interrupted.is_set():
            if not server.is_running or (not is_ready and time.monotonic() > deadline):
                raise RunError(f"the server {'has ended' if is_ready else 'did not start'}: {server.last_words()}")
            if joining is not None:
                await joining.renew()
            elif not is_ready:
                with suppress(ServerLostError, RequestRefusedError):
                    await connection.get(fleet.adapter.health_path, fleet.settings.health_timeout_s)
                    is_ready = True
                    _say(f"ready at {address}")
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await interrupted.wait()
    finally:
        if joining is not None:
            _say("leaving: requests that it works on are finished, or go on elsewhere")
            with suppress(RunError):
                await joining.leave(fleet.settings.drain_timeout_s)
        await connection.close()
        await server.end()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
