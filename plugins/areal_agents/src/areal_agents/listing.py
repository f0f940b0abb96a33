"""The command `areal environments`: list the environments that are installed, and what each needs.

Environments of verifiers, NeMo Gym and OpenEnv have interpreters of their own: name them with --python.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_agents.foreign_process import interpreter_environment
from areal_core.errors import UsageError
from areal_core.plugins import install_command
from areal_core.programs import print_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAM = Path(__file__).parent / "interpreter" / "areal_environments.py"
OWN = {
    "gymnasium": ("agents", "multi_turn with environment: agents/gymnasium"),
    "textarena": ("agents", "multi_turn with environment: agents/textarena"),
    "mcp": ("agents", "agents/tools with mcp"),
    "reasoning-gym": ("rewards", "rewards/reasoning_gym, a data set and a reward"),
}
"""Libraries that areal imports: plugin whose extra installs it, and where it is used."""
FOREIGN = {
    "verifiers": ("agents/verifiers", "a virtual environment with `pip install verifiers==0.4.0 uv`"),
    "nemo-gym": ("agents/nemo_gym", "a virtual environment of Python 3.12 with `pip install nemo-gym==0.4.0`"),
    "openenv": ("agents/openenv", "a virtual environment with `pip install openenv==0.10.0`"),
}
"""Libraries with interpreters of their own: the workflow and data set that play them, and how they are installed."""
TIMEOUT_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Run `areal environments` with these arguments and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal environments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        action="append",
        default=[],
        help="interpreter that has environments, such as ~/verifiers/bin/python; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    arguments = parser.parse_args(argv)
    found = [*_own(), *(row for python in arguments.python for row in _of(Path(python).expanduser()))]
    seen = {row["library"] for row in found}
    found += [
        {"library": name, "version": "", "name": "", "use": kind, "needs": [f"{how}, and --python"]}
        for name, (kind, how) in FOREIGN.items()
        if name not in seen
    ]
    print_out(json.dumps(found, indent=2) if arguments.json else _table(found))
    return 0


def _own() -> Iterator[dict[str, Any]]:
    for name, (plugin, use) in OWN.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        needs = [] if version else [install_command(plugin, extra=name)]
        yield {"library": name, "version": version, "name": "", "use": use, "needs": needs}
    needs = [] if shutil.which("bwrap") else ["bubblewrap, a package of your system"]
    yield {"library": "harbor", "version": "", "name": "", "use": "agents/harbor, a folder of tasks", "needs": needs}


def _of(python: Path) -> list[dict[str, Any]]:
    """Return the environments of another interpreter.

    Raises:
        UsageError: it cannot be run, or has none of the libraries.
    """
    try:
        done = subprocess.run(
            [python, PROGRAM],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=True,
            env=interpreter_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        said = lines[-1] if lines else str(error)
        raise UsageError(f"--python {python} cannot list its environments: {said}") from error
    try:
        rows = [
            {**row, "use": f"{FOREIGN[row['library']][0]} {row['use']}".strip(), "python": str(python)}
            for row in json.loads(done.stdout)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--python {python} is no Python interpreter: it printed {done.stdout[:80]!r}") from error
    if not rows:
        raise UsageError(f"--python {python} has none of {', '.join(FOREIGN)}")
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [("library", "version", "environment", "in a config", "needs")]
    lines += [(row["library"], row["version"] or "-", row["name"], row["use"], ", ".join(row["needs"])) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:4], widths, strict=True)), line[4]]).rstrip()
        for line in lines
    )
