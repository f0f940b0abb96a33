"""The role of an inference server: it is one, or keeps a program of somebody else's, started as its plugin says.

For a program it picks a port, starts it, waits until it is healthy, and announces its address. Whether the server does
what it should from then on is seen by the rollout controller, which asks it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.config import load_run
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import describe_exit
from areal_core.launchers.guard import HUB_VARIABLE, last_words
from areal_core.launchers.machine import free_port, http_address
from areal_core.launchers.member import ASKED_TO_STOP
from areal_core.messages import Credentials
from areal_core.proxies import bypass_proxies
from areal_core.runs.models import model_reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.launchers.member import Member
    from areal_core.runs.folder import RunFolder

ROLE = "server"
POLL_S, ANSWER_S, GRACE_S = 0.1, 5.0, 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the run's own addresses, which no proxy reaches."""


def play(run: RunFolder, member: Member) -> int:
    """Until the server ends; its exit code."""
    resolved = load_run(run.path)
    chosen = resolved.config.inference_engine
    assert chosen is not None
    settings: Any = chosen.settings
    model = model_reference(resolved, run)
    if hasattr(settings, "serve"):
        code: int = settings.serve(resolved.config, model, member, run.path)
        return code
    port, limit = free_port(), settings.start_timeout_s
    command = settings.server_command(model, member.host, port, run.path)
    stopping = threading.Event()
    member.on_stop = stopping.set
    secret = {HUB_VARIABLE, *Credentials().as_environment()}  # a server is told nothing of the run
    environment = {name: value for name, value in os.environ.items() if name not in secret}
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
        words = f"{describe_exit(server.returncode)}; the end of its log:\n{last_words(run.log_path(member.name))}"
        is_lost = is_healthy or server.returncode < 0 or "address already in use" in words.lower()
        raise (LostError if is_lost else RunError)(words)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    return ASKED_TO_STOP


def start_program(command: Any, environment: Mapping[str, str], **how: Any) -> subprocess.Popen[bytes]:
    """Start the program of a server (`ServerCommand`).

    Raises:
        RunError: it is not there.
    """
    added = {**environment, **command.environment}
    bypass_proxies(added)  # SGLang asks its own address before it serves
    try:
        return subprocess.Popen(command.arguments, env=added, stdin=subprocess.DEVNULL, **how)
    except OSError as error:
        raise RunError(f"{command.arguments[0]} cannot be started: {error.strerror}") from error


def is_healthy_at(url: str) -> bool:
    """Whether a server says so there; one that asks for a key serves as well."""
    try:
        with _DIRECT.open(url, timeout=ANSWER_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:  # a gateway says 404 for a server that loads
        return error.code in (401, 403)
    except (OSError, ValueError):
        return False
