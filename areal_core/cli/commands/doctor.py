"""Check whether this machine can run areal, what areal can do with a MODEL, or why a RUN does not learn.

With the folder of a run, each line answers one question from the run's own records, with the figures that show it.
Otherwise the core and every installed plugin have health checks, each of which runs in a process of its own. For a
model on the hub, only its description is downloaded. A model that is larger than 2 GiB or has no weights on this
machine is tested as a small random copy with the same config, in float32 and bfloat16. The exit code is 1 if something
is WRONG. `?` marks what could not be found out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.cli.output import print_out
from areal_core.errors import UsageError, printable

if TYPE_CHECKING:
    import argparse

SUMMARY = "check whether this machine can run areal"

_VERDICTS: Final = {True: "well", False: "WRONG", None: "?"}
_CLEAR_LINE: Final = "\r\x1b[K"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal doctor`."""
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="MODEL|RUN",
        help="check this model, a folder or a name on the hub; or the run of this run folder",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Run all health checks and print the answers. Return 1 if one of them has failed, else 0."""
    from areal_core.checks.doctor import ask_health_checks, check_installed
    from areal_core.plugins.catalog import Catalog
    from areal_core.plugins.manager import survey
    from areal_core.runs.models import described_model

    if arguments.subject is not None and _is_run(Path(arguments.subject)):
        return _examine(Path(arguments.subject), as_json=arguments.json)
    plugins = survey(Catalog.scan())
    model = None if arguments.subject is None else described_model(arguments.subject)
    try:
        answers = [*(check_installed(plugins) if model is None else ()), *ask_health_checks(plugins, model, _show)]
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()
    if arguments.json:
        lines = [
            {"check": answer.check, "meaning": answer.meaning, "is_well": answer.is_well, "found": answer.text}
            for answer in answers
        ]
        print_out(json.dumps(lines, indent=2))
    else:
        meaning = ""
        for answer in answers:
            print_out(f"{_VERDICTS[answer.is_well]:5}  {answer.check}: {answer.text}")
            if meaning != answer.meaning:
                meaning = answer.meaning
                print_out(f"       ({meaning})")
    return 1 if any(answer.is_well is False for answer in answers) else 0


def _is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run; a model's has no attempts."""
    return (folder / "attempts").is_dir() or (folder / "metrics.jsonl").is_file()


def _examine(run_dir: Path, *, as_json: bool) -> int:
    """Print what the records of a run say about its learning. Return 1 if something is wrong, else 0."""
    from areal_core.diagnostics import examine

    answers = examine(run_dir)
    if not answers:
        raise UsageError(f"the run in {run_dir} has finished no step", hints=[f"areal status {run_dir}"])
    if as_json:
        print_out(json.dumps([dataclasses.asdict(answer) for answer in answers], indent=2))
    else:
        for answer in answers:
            print_out(printable(f"{_VERDICTS[answer.is_well]:5}  {answer.question}: {answer.text}"))
    return 1 if any(answer.is_well is False for answer in answers) else 0


def _show(progress: str) -> None:
    """Show the progress if standard error is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{progress}")
        sys.stderr.flush()
