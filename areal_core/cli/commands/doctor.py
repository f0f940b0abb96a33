"""Ask whether this machine can run areal: what the core and every installed plugin needs of it.

Each question is asked in a process of its own. The exit code is 1 when something is not well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from areal_core.cli.output import print_out

if TYPE_CHECKING:
    import argparse

    from areal_core.plugins.records import Record
    from areal_core.plugins.registration import Plugin

SUMMARY = "check whether this machine can run areal"

DEADLINE_S: Final = 120.0
"""For all questions together, which are asked at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal doctor`."""
    parser.add_argument("--json", action="store_true", help="write it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Ask everything, say what was found; 1 if something is not well."""
    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.survey import survey

    plugins = survey(Catalog.scan())
    found = [*(_loads(plugin) for plugin in plugins), *_asked(plugins)]
    if arguments.json:
        print_out(json.dumps(found, indent=2))
    else:
        meaning = ""
        for one in found:
            print_out(f"{'well' if one['is_well'] else 'WRONG':5}  {one['check']}: {one['found']}")
            if meaning != one["meaning"]:
                meaning = one["meaning"]
                print_out(f"       ({meaning})")
    return 0 if all(one["is_well"] for one in found) else 1


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


def _asked(plugins: list[Plugin]) -> list[dict[str, Any]]:
    """The answers to all health checks."""
    records = [record for plugin in plugins for kind, record in plugin.records if kind == "health_checks"]
    began = time.monotonic()
    asked = [_ask(record) for record in records]
    answers = []
    for record, process in zip(records, asked, strict=True):
        try:
            out, err = process.communicate(timeout=max(0.0, DEADLINE_S - (time.monotonic() - began)))
            is_well, found = json.loads(out.splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            is_well, found = False, f"no answer within {DEADLINE_S:g} s"
        except (IndexError, ValueError):
            words = err.strip().splitlines()[-1:] or [f"ended with exit code {process.returncode}"]
            is_well, found = False, words[0]
        answers.append(
            {"check": record.reference, "meaning": record.summary, "is_well": is_well, "found": found or "yes"}
        )
    return answers


def _ask(record: Record) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, record.plugin, record.name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def _answer(plugin: str, name: str) -> None:
    """Ask one question, in the process that is there for it."""
    from areal_core.plugins import Finding, HealthCheck, PluginManager

    manager = PluginManager.load([plugin])
    record = next(each for kind, each in manager.records() if kind == "health_checks" and each.name == name)
    assert isinstance(record, HealthCheck)
    target: Any = manager.import_from(record, record.target)
    found = target()
    finding = found if isinstance(found, Finding) else Finding(found is None, "" if found is None else str(found))
    sys.stdout.write(f"\n{json.dumps(finding)}\n")


if __name__ == "__main__":
    _answer(*sys.argv[1:])
