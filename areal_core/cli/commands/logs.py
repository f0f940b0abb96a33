"""Show what the processes of a run write. Without NAME: which there are, and when each wrote last."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from areal_core.cli.output import say
from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse

SUMMARY = "show what the processes of a run write"
POLL_S = 0.2
LONGEST = 1 << 20
"""Bytes from the end in which lines are looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal logs`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
    parser.add_argument("name", metavar="NAME", nargs="?", help="of a process, such as trainer-0")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as it writes, until Ctrl-C")
    parser.add_argument("-n", "--lines", type=int, default=40, help="so many from the end")


def execute(arguments: argparse.Namespace) -> int:
    """Print, and follow where asked."""
    folder = arguments.run_dir / "logs"
    logs = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not logs:
        raise UsageError(f"there are no logs in {folder}", hints=["name the folder of a run that was started"])
    if arguments.lines < 0:
        raise UsageError(f"--lines takes a number, 0 or more, not {arguments.lines}")
    if arguments.name is None:
        for name, path in logs.items():
            status = path.stat()
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime))
            say(f"{name:22s} {status.st_size:12,d} bytes, last written {when}")
        return 0
    if arguments.name not in logs:
        raise UsageError(
            f"no process called '{arguments.name}' has written a log", hints=[f"there are: {', '.join(logs)}"]
        )
    path = logs[arguments.name]
    with path.open("rb") as file:
        for line in _last_lines(file, arguments.lines):
            say(line)
        if arguments.follow:
            _follow(path, file)
    return 0


def _last_lines(file: IO[bytes], count: int) -> list[str]:
    size = file.seek(0, 2)
    file.seek(max(0, size - LONGEST))
    lines = file.read().decode(errors="replace").splitlines()
    return lines[len(lines) - count :] if count < len(lines) else lines


def _follow(path: Path, file: IO[bytes]) -> None:
    """A log that is full is begun anew under the same name."""
    while True:
        if data := file.read():
            say(data.decode(errors="replace").rstrip("\n"))
            continue
        if path.exists() and path.stat().st_ino != _number(file):
            rest = file.read()
            file = path.open("rb")
            if rest:
                say(rest.decode(errors="replace").rstrip("\n"))
            continue
        time.sleep(POLL_S)


def _number(file: IO[bytes]) -> int:
    import os

    return os.fstat(file.fileno()).st_ino
