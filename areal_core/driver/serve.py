"""Starts a server by hand, for `areal serve`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.driver.serving import INTERVAL_S, Joining
from areal_core.errors import RunError, UsageError
from areal_core.gpus import show_gpus
from areal_core.inference.programs import is_healthy, start_program
from areal_core.inference.settings import LOOPBACK
from areal_core.interfaces.launcher import ProcessEnd
from areal_core.proxies import bypass_proxies
from areal_core.runs import RunFolder, model_reference
from areal_core.runs.engines import build_adapter, is_adapter
from areal_core.runtime.guard import make_scratch
from areal_core.runtime.logs import append_to_log, last_words
from areal_core.runtime.network import free_port, http_address
from areal_core.runtime.process_tree import adopt_orphans, end_descendants
from areal_core.runtime.terminal import log as _log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import Resolved
    from areal_core.inference.adapter import ServerAdapter, ServerCommand


def serve(
    resolved: Resolved, run_dir: Path | None, *, name: str | None, host: str, port: int, gpus: Sequence[int] | None
) -> int:
    """Start a server, let it join a run, and keep it running until an interrupt.

    Args:
        resolved: the config whose `inference_engine` and `model` are served.
        run_dir: folder of the run that it joins; None for a server without a run.
        name: name of the server; None for one made from the host's name.
        host, port: where it listens; port 0 for any free one.
        gpus: the GPUs that it may use; None for all.

    Returns:
        0 after an interrupt.

    Raises:
        UsageError: the config's engine is not a server, or the server would be open to others without a key.
        RunError: the server has ended, or the run refuses it.
    """
    chosen = resolved.config.inference_engine
    if chosen is None or hasattr(chosen.settings, "serve") or not is_adapter(chosen):
        message = "no inference engine" if chosen is None else f"'{chosen.reference}', which only a run starts"
        raise UsageError(
            f"{resolved.name} has {message}: there is no server to start",
            hints=["choose one with inference_engine=sglang or vllm"],
        )
    settings: Any = chosen.settings
    settings = settings.for_run(resolved.config)
    if run_dir is not None:
        settings = settings.with_key(run_dir)
    if host not in LOOPBACK and not settings.key:
        raise UsageError(
            f"a server on {host} can be reached by others, and has no key",
            hints=["set inference_engine.api_key=env:NAME, here and in the run"],
        )
    has_model = run_dir is not None and RunFolder(run_dir).model_note.is_file()
    if resolved.config.model.source is not None and not has_model:
        hint = "try again when the run trains" if run_dir else "name a folder with model.path, or use --join"
        raise UsageError("the model is made when a run starts, and is not there yet", hints=[hint])
    adapter = build_adapter(chosen, settings)
    run = RunFolder(run_dir or Path(tempfile.mkdtemp(prefix="areal-serve-")))
    name = name or f"added-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    model, port = model_reference(resolved, run), port or free_port()
    scratch = make_scratch()
    bypass_proxies(hosts=[host])
    if gpus is not None:
        show_gpus(gpus)
    adopt_orphans()
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    try:
        command = adapter.command(model, host, port, scratch)
        address = command.address or http_address(host, port)
        joining = None if run_dir is None else Joining(run, name, address, _log)
        if joining is not None:
            joining.renew()  # raises before the start if the run has a server of this name
        _log(f"starting a server of {model.path} at {address}; log: {run.log_path(name)}; Ctrl-C ends it")
        try:
            _keep(adapter, command, run.log_path(name), address, joining, interrupted)
        finally:
            if joining is not None:
                _log("leaving: requests that it works on are finished, or continue elsewhere")
                with suppress(RunError):
                    joining.leave(settings.drain_timeout_s)
    finally:
        end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _keep(
    adapter: ServerAdapter,
    command: ServerCommand,
    log: Path,
    address: str,
    joining: Joining | None,
    interrupted: threading.Event,
) -> None:
    """Start the server's program, and return at an interrupt."""
    with append_to_log(log) as file:  # in a new session: Ctrl-C must not reach the server
        server = start_program(command, os.environ, stdout=file, stderr=file, start_new_session=True)
    limit_s = adapter.settings.start_timeout_s
    is_ready, deadline = joining is not None, time.monotonic() + limit_s
    while not interrupted.wait(INTERVAL_S):
        if (code := server.poll()) is not None:
            raise RunError(f"the server {ProcessEnd(code, last_words(log)).describe()}")
        if not is_ready and time.monotonic() > deadline:
            raise RunError(f"the server is not healthy after {limit_s:g} s (start_timeout_s); see {log}")
        if joining is not None:
            joining.renew()
        elif not is_ready and asyncio.run(is_healthy(adapter, address)):
            is_ready = True
            _log(f"ready at {address}")
