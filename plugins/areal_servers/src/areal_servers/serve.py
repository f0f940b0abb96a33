"""A server that is started by hand: what `areal serve` calls."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from areal_core.errors import RunError, UsageError
from areal_core.runs.roles import model_reference
from areal_servers.interface import RequestRefusedError, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_core.interfaces import ModelReference
    from areal_servers.connection import ServerConnection
    from areal_servers.fleet import ServerFleet
    from areal_servers.registry import Registry
    from areal_servers.settings import FleetSettings

POLL_S = 0.5
STALE_S = 5.0
"""A status file that is older was left by a run that is over."""


def serve(
    resolved: Resolved, run_dir: Path | None, *, name: str | None, host: str, port: int, gpus: Sequence[int] | None
) -> int:
    """Start a server, announce it to the run, and keep it until somebody interrupts.

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
        RunError: the server ended by itself.
    """
    chosen = resolved.config.inference_engine
    from areal_servers.settings import FleetSettings

    if chosen is None or not isinstance(chosen.settings, FleetSettings):
        told = "no inference engine" if chosen is None else f"'{chosen.reference}', which runs inside of the run"
        raise UsageError(
            f"{resolved.name} has {told}: there is no server to start",
            hints=["choose one with inference_engine.type=sglang or vllm"],
        )
    if host not in ("127.0.0.1", "localhost", "::1") and chosen.settings.api_key is None:
        raise UsageError(
            f"a server on {host} can be reached by others, and has no key",
            hints=["set inference_engine.api_key=env:NAME, here and in the run"],
        )
    if port and not _is_free(host, port):
        raise UsageError(f"port {port} is taken", hints=["choose another --port, or leave it out"])
    folder = run_dir or Path(tempfile.mkdtemp(prefix="areal-serve-"))
    if resolved.config.model.source is not None and not (folder / "model_folder.txt").is_file():
        hint = "try again when the run trains" if run_dir else "name a folder with model.path, or use --run"
        raise UsageError("the model is made when a run starts, and is not there yet", hints=[hint])
    name = name or f"added-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    engine = cast("ServerFleet", chosen.build(scratch=folder, log_dir=folder / "logs", run_dir=run_dir, gpus=gpus))
    model = model_reference(resolved, folder)
    return asyncio.run(_serve(engine, chosen.settings, model, folder, name, host, port, joins=run_dir is not None))


async def _serve(
    engine: ServerFleet,
    settings: FleetSettings,
    model: ModelReference,
    folder: Path,
    name: str,
    host: str,
    port: int,
    *,
    joins: bool,
) -> int:
    from areal_servers.connection import ServerConnection
    from areal_servers.process import ServerProcess, free_port
    from areal_servers.registry import Registry

    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    address = f"http://{host}:{port or free_port()}"
    process = ServerProcess(folder / "logs" / f"{name}.log", engine.gpus)
    connection = ServerConnection(address, settings.api_key.get() if settings.api_key else "")
    registry = Registry(folder)
    await process.start(engine.adapter.command(model, host, int(address.rsplit(":", 1)[1])))
    _say(f"starting {engine.adapter.name} of {model.path}; log: {process.log}")
    try:
        deadline = time.monotonic() + settings.start_timeout_s
        while not interrupted.is_set() and not await _is_healthy(connection):
            if not process.is_running or time.monotonic() > deadline:
                raise RunError(f"the server did not start: {process.last_words()}")
        if joins and not interrupted.is_set():
            registry.announce(name, address)
        _say(f"ready at {address}{f'; it joins the run in {folder} as {name}' if joins else ''}; Ctrl-C takes it out")
        while not interrupted.is_set():
            if not process.is_running:
                raise RunError(f"the server has ended: {process.last_words()}")
            await asyncio.sleep(POLL_S)
        if joins:
            await _leave(registry, folder, name, settings.drain_timeout_s)
        return 0
    finally:
        registry.withdraw(name)
        await connection.close()
        await process.end()


async def _leave(registry: Registry, folder: Path, name: str, patience_s: float) -> None:
    """Ask the run to let go, and wait until it has, or until nobody is there to do so."""
    registry.withdraw(name)
    _say("leaving: requests that it works on are finished, or go on elsewhere")
    status, deadline = folder / "status" / "rollout.json", time.monotonic() + patience_s + STALE_S
    while time.monotonic() < deadline:
        is_alive = status.is_file() and time.time() - status.stat().st_mtime < STALE_S
        if not is_alive or registry.states().get(name) in (None, "gone", "refused"):
            return
        await asyncio.sleep(POLL_S)


async def _is_healthy(connection: ServerConnection) -> bool:
    try:
        await connection.get("/health", 5.0)
    except (ServerLostError, RequestRefusedError):
        await asyncio.sleep(POLL_S)
        return False
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
