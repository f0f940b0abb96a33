"""`areal run` in a process of its own, on behalf of a script or a notebook.

The program that calls `train` may have an event loop, threads, or a GPU in use; a driver that shared its process would
fork with all of them. What happens to one process reaches the other:

    Ctrl-C or SIGTERM here          -> the same signal there: a checkpoint, then the end
    this program is killed          -> its end of the pipe closes: SIGTERM there
    an error there                  -> `error.json`, raised here with its message, hints and problems
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.config.yaml_text import dump
from areal_core.errors import ArealError, ConfigError, PluginError, RunError, UsageError
from areal_core.runtime.terminal import log

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

POLL_S: Final = 0.5
"""Seconds between two checks whether the process has ended while it writes nothing."""
DRAIN_S: Final = 10.0
"""Seconds after the end of the process in which its children may still write."""
CONFIG: Final = "train().yaml"
"""File name of the config that a call makes. Nobody sees the file: messages name the call instead."""


def run_command(config: Mapping[str, Any], run_dir: Path, plugins: Sequence[str]) -> None:
    """Run a config to its end. Its relative paths mean the current folder.

    Args:
        config: the tree of a YAML file.
        run_dir: folder of the run.
        plugins: to load as well.

    Raises:
        ArealError: the config is wrong, or the run failed.
        KeyboardInterrupt: Ctrl-C has stopped the run, after a checkpoint.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / CONFIG
        path.write_text(dump({"base_dir": str(Path.cwd()), **config}), encoding="utf-8")
        try:
            named = [word for name in plugins for word in ("--plugins", name)]
            _areal(Path(temporary), "run", str(path), f"run_dir={json.dumps(str(run_dir))}", *named)
        except ArealError as error:
            message, *hints = [text.replace(str(path), CONFIG[:-5]) for text in (error.message, *error.hints)]
            error.message, error.hints = message, tuple(hints)
            raise


def resume_command(folder: Path, changes: Mapping[str, Any], *, allow_changes: bool = False) -> None:
    """Resume a run. Raises like `run_command`.

    Args:
        folder: folder of the run.
        changes: config values to change, sections as mappings.
        allow_changes: resume although something else has changed.
    """
    words = [f"{key}={json.dumps(value)}" for key, value in _leaves(changes)]
    words += ["--allow-changes"] * allow_changes
    with tempfile.TemporaryDirectory() as temporary:
        _areal(Path(temporary), "run", "--resume", str(folder), *words)


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _areal(temporary: Path, *words: str) -> None:
    """Run the command line in a process, and show its output line by line."""
    error_file = temporary / "error.json"
    command = [sys.executable, "-m", "areal_core.library", str(error_file), *words]  # see `__main__.py`
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A new session keeps Ctrl-C of the terminal away from the process, which gets it from here, once.
    with subprocess.Popen(command, start_new_session=True, **streams) as process:
        assert process.stdout is not None
        with _forwarding(process):
            for line in _lines(process):
                log(line)
            code = process.wait()
    if error_file.is_file():
        raise _error(json.loads(error_file.read_text(encoding="utf-8")), code)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code > 128:
        raise SystemExit(code)
    if code:
        raise RunError(f"areal run has ended with exit code {code}", hints=["its output is above"])


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines of a process. A child that outlives it may hold the pipe open, so its end ends the lines, too."""
    assert process.stdout is not None
    rest, deadline = b"", math.inf
    while time.monotonic() < deadline:
        if process.poll() is not None:  # asked before the read, which then finds what it wrote last
            deadline = min(deadline, time.monotonic() + DRAIN_S)
        if select.select([process.stdout], [], [], POLL_S)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        elif deadline < math.inf:
            break
    if rest:
        yield rest.decode(errors="replace")


def _error(problem: Mapping[str, Any], code: int) -> ArealError:
    """Return the error of the process: an error of the nearest type that can be made of a message and hints."""
    message, hints = problem["message"], problem["hints"]
    if "UsageError" in problem["types"]:
        return UsageError(message, hints=hints)
    if "PluginError" in problem["types"]:
        return PluginError(message, hints=hints)
    if "ConfigError" in problem["types"]:
        return ConfigError(message, hints=hints, problems=problem["problems"])
    return RunError(message, hints=hints, exit_code=code)


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Send the process the signals that ask this program to end. Only the main thread can receive signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    former = {number: signal.signal(number, lambda received, _: process.send_signal(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
