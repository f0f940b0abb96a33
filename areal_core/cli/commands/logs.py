"""Show what the processes of a run write. Without NAME: which there are, and when each wrote last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from areal_core.cli.output import print_error, print_out
from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from areal_core.runs.folder import RunFolder

SUMMARY = "show what the processes of a run write"
LINES = 40
POLL_S = 0.2
LONGEST = 1 << 20
"""Bytes from the end in which lines are looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal logs`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of a process, such as trainer-0")
    parser.add_argument("-f", "--follow", action="store_true", help="keep following until the run ends or Ctrl-C")
    parser.add_argument("-n", "--lines", type=int, help=f"number of lines from the end ({LINES})")


def execute(arguments: argparse.Namespace) -> int:
    """Print, and follow where asked."""
    folder = arguments.run_dir / "logs"
    logs = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not logs:
        raise UsageError(f"there are no logs in {folder}", hints=["name the folder of a run that was started"])
    lines = LINES if arguments.lines is None else arguments.lines
    if lines < 0:
        raise UsageError(f"--lines takes a number, 0 or more, not {lines}")
    if arguments.name is None and (arguments.follow or arguments.lines is not None):
        raise UsageError("-f and -n are for the log of one process: NAME it", hints=[f"there are: {', '.join(logs)}"])
    if arguments.name is None:
        for name, path in logs.items():
            status = path.stat()
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime))
            print_out(f"{name:22s} {status.st_size:12,d} bytes, last written {when}")
        return 0
    if arguments.name not in logs:
        raise UsageError(
            f"no process called '{arguments.name}' has written a log", hints=[f"there are: {', '.join(logs)}"]
        )
    from areal_core.runs.folder import RunFolder

    path = logs[arguments.name]
    with path.open("rb") as file:
        for line in _last_lines(file, lines):
            print_out(line)
        if arguments.follow:
            _follow(path, file, RunFolder(arguments.run_dir))
    return 0


def _last_lines(file: IO[bytes], count: int) -> list[str]:
    size = file.seek(0, 2)
    file.seek(max(0, size - LONGEST))
    lines = file.read().decode(errors="replace").splitlines()
    return lines[len(lines) - count :] if count < len(lines) else lines


def _follow(path: Path, file: IO[bytes], run: RunFolder) -> None:
    """A log that is full is begun anew under the same name."""
    from areal_core.driver.attempts import is_over

    was_over = False
    while True:
        if data := file.read():
            print_out(data.decode(errors="replace").rstrip("\n"))
            continue
        if path.exists() and path.stat().st_ino != _number(file):
            rest = file.read()
            file = path.open("rb")
            if rest:
                print_out(rest.decode(errors="replace").rstrip("\n"))
            continue
        if was_over:
            print_error(f"the run in {run.path} has ended: nothing more is written")
            return
        was_over = is_over(run)  # what it wrote last may be there only now
        time.sleep(0 if was_over else POLL_S)


def _number(file: IO[bytes]) -> int:
    import os

    return os.fstat(file.fileno()).st_ino
