"""The main function of an inference server: serves in this process, or runs the server program of a plugin.

For a program, it picks a port, starts the program, waits until it is healthy, and announces its address. From then on
the rollout controller checks the server's health.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import Settings, load_run
from areal_core.errors import LostError, RunError
from areal_core.inference.programs import is_healthy, start_program
from areal_core.inference.settings import FleetSettings
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.model import Estimate
from areal_core.runs.engines import build_adapter, settings_for
from areal_core.runs.models import model_path, model_paths, model_reference, models_by_role, read_model
from areal_core.runtime.environment import ACCESS_VARIABLES
from areal_core.runtime.logs import last_words
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.network import free_port, http_address

if TYPE_CHECKING:
    from areal_core.config import Resolved
    from areal_core.interfaces.model import ModelReference
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member

ROLE = "server"
POLL_S = 0.1
"""Seconds between two checks whether the program is healthy or has ended."""
GRACE_S = 5.0
"""Seconds that the program gets to shut down after SIGTERM."""


def play(run: RunFolder, member: Member) -> int:
    """Serve until the server ends or the run is asked to stop. Return the exit code.

    Raises:
        LostError: the server ended after it was healthy, was killed, or was not healthy in time.
        RunError: the server ended before it was healthy.
    """
    resolved = load_run(run.path)
    chosen = resolved.config.inference_engine
    assert chosen is not None
    settings = settings_for(resolved.config, run.path, member.host)
    model = model_reference(resolved, run)
    if hasattr(settings, "serve"):
        code: int = settings.serve(resolved.config, model, member, run.path)
        return code
    adapter = build_adapter(chosen, within_its_gpu(settings, resolved, model))
    port, limit = free_port(), settings.start_timeout_s
    command = adapter.command(model, member.host, port, member.scratch)
    stopping = threading.Event()
    member.on_stop = stopping.set
    # The program must not reach the driver.
    environment = {name: value for name, value in os.environ.items() if name not in ACCESS_VARIABLES}
    server = start_program(command, environment)
    member.enter("loading the model")
    address, serves = command.address or http_address(member.host, port), False
    deadline = time.monotonic() + limit
    while server.poll() is None and not stopping.is_set():
        if not serves and asyncio.run(is_healthy(adapter, address)):
            serves = True
            member.announce(ROLE, address)
            member.enter("serving")
        elif not serves and time.monotonic() > deadline:
            raise LostError(f"was not healthy within inference_engine.start_timeout_s = {limit:g}")
        stopping.wait(POLL_S)
    if not stopping.is_set():
        message = f"{describe_exit(server.returncode)}; the end of its log:\n{last_words(run.log_path(member.name))}"
        # Another process may have bound the port since `free_port`. No server reports that in its exit code.
        is_lost = serves or server.returncode < 0 or "address already in use" in message.lower()
        raise (LostError if is_lost else RunError)(message)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    return ASKED_TO_STOP


def within_its_gpu(settings: Any, resolved: Resolved, model: ModelReference) -> Any:
    """Return the settings of a server, with limits for its memory if it shares its GPU.

    Raises:
        RunError: the memory of the GPU or of the trainer is not known, or there is too little.
    """
    config = resolved.config
    if not isinstance(settings, FleetSettings) or not settings.shares_gpu(config):
        return settings
    paths = model_paths(config, model.path) | {"model.path": model.path}
    stored = {key: read_model(Path(model_path(resolved, path, key))) for key, path in paths.items()}
    trainer = config.train_engine.settings
    plan = trainer.estimate(config, models_by_role(config, stored)) if isinstance(trainer, Settings) else Estimate()
    share = settings.gpu_share(config, plan, stored["model.path"])
    if share is None:
        raise RunError(
            "the memory of this GPU is not known: nvidia-smi does not answer",
            hints=["set placement.gpu_memory_gib, or the server's options for its memory"],
        )
    return settings.within(share)
