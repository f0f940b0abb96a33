"""Ask whether this machine can run areal, or with MODEL what areal can do with a model.

The core and every installed plugin ask their own questions, each in a process of its own. Of a model on the hub only
the description is downloaded. A model of more than 2 GiB, or without weights on this machine, is tried as a small
random copy with the same config, in float32 and bfloat16. The exit code is 1 when something is not well; `?` is a
question that could not be tried.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.cli.output import print_out

if TYPE_CHECKING:
    import argparse

    from areal_core.plugins.records import Record
    from areal_core.plugins.registration import Plugin

SUMMARY = "check whether this machine can run areal"

_VERDICTS: Final = {True: "well", False: "WRONG", None: "?"}
DEADLINE_S: Final = 120.0
"""Seconds for all questions together, which are asked concurrently."""
MODEL_DEADLINE_S: Final = 900.0
"""The same for questions about a model, most of which load it or make a copy."""
_INTERVAL_S: Final = 1.0
"""Between two lines of progress."""
_CLEAR_LINE: Final = "\r\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal doctor`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or its name on the hub")
    parser.add_argument("--json", action="store_true", help="write it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Ask everything, say what was found; 1 if something is not well."""
    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.manager import survey
    from areal_core.runs.models import described_model

    plugins = survey(Catalog.scan())
    if arguments.model is None:
        found = [*(_loads(plugin) for plugin in plugins), *_asked(plugins)]
    else:
        found = _asked(plugins, described_model(arguments.model))
    if arguments.json:
        print_out(json.dumps(found, indent=2))
    else:
        meaning = ""
        for one in found:
            print_out(f"{_VERDICTS[one['is_well']]:5}  {one['check']}: {one['found']}")
            if meaning != one["meaning"]:
                meaning = one["meaning"]
                print_out(f"       ({meaning})")
    return 1 if any(one["is_well"] is False for one in found) else 0


def _loads(plugin: Plugin) -> dict[str, Any]:
    """Whether a plugin can be loaded, and has what it requires."""
    installed = plugin.installed
    faults = [str(plugin.cause)] if plugin.cause else installed.unmet()
    return {
        "check": f"plugin {installed.name}",
        "meaning": "it can be loaded, and what it requires is installed",
        "is_well": not faults,
        "found": "; ".join(faults) or f"{installed.distribution} {installed.version}",
    }


def _asked(plugins: list[Plugin], model: Path | None = None) -> list[dict[str, Any]]:
    """The answers to all health checks, those about a model where there is one."""
    from areal_core.plugins.records import HealthCheck

    records = [record for plugin in plugins for _, record in plugin.records if isinstance(record, HealthCheck)]
    records = [record for record in records if record.of_model == (model is not None)]
    words = [] if model is None else [str(model)]
    deadline_s = DEADLINE_S if model is None else MODEL_DEADLINE_S
    began = time.monotonic()
    asked = [_ask(record, words) for record in records]
    answers: list[dict[str, Any]] = []
    try:
        for record, process in zip(records, asked, strict=True):
            try:
                out, err = _output(process, began, deadline_s, f"{len(answers)} of {len(asked)} answers")
                is_well, found = json.loads(out.splitlines()[-1])
            except subprocess.TimeoutExpired:
                is_well, found = False, f"no answer within {deadline_s:g} s"
            except (IndexError, ValueError):
                words = err.strip().splitlines()[-1:] or [f"ended with exit code {process.returncode}"]
                is_well, found = False, words[0]
            answers.append(
                {"check": record.reference, "meaning": record.summary, "is_well": is_well, "found": found or "yes"}
            )
    finally:
        for process in asked:
            _end(process)
    return answers


def _output(process: subprocess.Popen[str], began: float, deadline_s: float, state: str) -> tuple[str, str]:
    """Wait for a question's output and errors; a terminal shows meanwhile that the command works.

    Raises:
        subprocess.TimeoutExpired: the deadline is over.
    """
    is_terminal = sys.stderr.isatty()
    try:
        while True:
            passed = time.monotonic() - began
            if is_terminal:
                sys.stderr.write(f"\r{state}, {passed:.0f} s")
                sys.stderr.flush()
            try:
                return process.communicate(timeout=max(0.0, min(_INTERVAL_S, deadline_s - passed)))
            except subprocess.TimeoutExpired:
                if passed >= deadline_s:
                    raise
    finally:
        if is_terminal:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End a question with the processes that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _ask(record: Record, words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, record.plugin, record.name, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _answer(plugin: str, name: str, *folder: str) -> None:
    """Ask one question, in the process that is there for it."""
    from areal_core.models.small_copy import NotTriedError
    from areal_core.plugins import Finding, HealthCheck, PluginManager

    manager = PluginManager.load([plugin])
    record = next(each for kind, each in manager.records() if kind == "health_checks" and each.name == name)
    assert isinstance(record, HealthCheck)
    target: Any = manager.import_from(record, record.target)
    try:
        found = target(*map(Path, folder))
    except NotTriedError as reason:
        found = Finding(None, f"not tried: {reason}")
    finding = found if isinstance(found, Finding) else Finding(found is None, "" if found is None else str(found))
    sys.stdout.write(f"\n{json.dumps(finding)}\n")


if __name__ == "__main__":
    _answer(*sys.argv[1:])
