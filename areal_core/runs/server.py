"""The main function of an inference server: serves in this process, or runs the server program of a plugin.

For a program, it picks a port, starts the program, waits until it is healthy, and announces its address. From then on
the rollout controller checks the server's health.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config import Settings, load_run
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.model import Estimate
from areal_core.proxies import bypass_proxies
from areal_core.runs.models import model_path, model_paths, model_reference, models_by_role, read_model
from areal_core.runtime.environment import ACCESS_VARIABLES
from areal_core.runtime.logs import last_words
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.network import free_port, http_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.config import Resolved
    from areal_core.interfaces.model import ModelReference
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.member import Member

ROLE = "server"
POLL_S = 0.1
"""Seconds between two checks whether the program is healthy or has ended."""
HEALTH_TIMEOUT_S = 5.0
"""Timeout of one health check."""
GRACE_S = 5.0
"""Seconds that the program gets to shut down after SIGTERM."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens the run's own addresses without a proxy."""


def play(run: RunFolder, member: Member) -> int:
    """Serve until the server ends or the run is asked to stop. Return the exit code.

    Raises:
        LostError: the server ended after it was healthy, was killed, or was not healthy in time.
        RunError: the server ended before it was healthy.
    """
    resolved = load_run(run.path)
    chosen = resolved.config.inference_engine
    assert chosen is not None
    settings: Any = chosen.settings
    model = model_reference(resolved, run)
    if hasattr(settings, "serve"):
        code: int = settings.serve(resolved.config, model, member, run.path)
        return code
    port, limit = free_port(), settings.start_timeout_s
    command = within_its_gpu(settings, resolved, model).server_command(model, member.host, port, run.path)
    stopping = threading.Event()
    member.on_stop = stopping.set
    # The program must not reach the driver.
    environment = {name: value for name, value in os.environ.items() if name not in ACCESS_VARIABLES}
    server = start_program(command, environment)
    member.enter("loading the model")
    address, is_healthy, deadline = http_address(member.host, port), False, time.monotonic() + limit
    while server.poll() is None and not stopping.is_set():
        if not is_healthy and is_healthy_at(f"{address}{command.health_path}"):
            is_healthy = True
            member.announce(ROLE, address)
            member.enter("serving")
        elif not is_healthy and time.monotonic() > deadline:
            raise LostError(f"was not healthy within inference_engine.start_timeout_s = {limit:g}")
        stopping.wait(POLL_S)
    if not stopping.is_set():
        message = f"{describe_exit(server.returncode)}; the end of its log:\n{last_words(run.log_path(member.name))}"
        # Another process may have bound the port since `free_port`. No server reports that in its exit code.
        is_lost = is_healthy or server.returncode < 0 or "address already in use" in message.lower()
        raise (LostError if is_lost else RunError)(message)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    return ASKED_TO_STOP


def within_its_gpu(settings: Any, resolved: Resolved, model: ModelReference) -> Any:
    """Return the settings (`FleetSettings`) of a server, with limits for its memory if it shares its GPU.

    Raises:
        RunError: the memory of the GPU or of the trainer is not known, or there is too little.
    """
    config = resolved.config
    if not settings.shares_gpu(config):
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


def start_program(command: Any, environment: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start the program of a server (`ServerCommand`).

    Raises:
        RunError: the program is not installed or cannot be started.
    """
    added = {**environment, **command.environment}
    bypass_proxies(added)  # SGLang asks its own address before it serves
    try:
        return subprocess.Popen(command.arguments, env=added, stdin=subprocess.DEVNULL, **how)
    except OSError as error:
        raise RunError(f"{command.arguments[0]} cannot be started: {error.strerror}") from error


def is_healthy_at(url: str) -> bool:
    """Return whether a server at this URL is healthy. A server that asks for a key is healthy, too."""
    try:
        with _DIRECT.open(url, timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:  # a gateway answers 404 while the server loads
        return error.code in (401, 403)
    except (OSError, ValueError):
        return False
