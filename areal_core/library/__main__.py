"""The process in which `train` runs `areal run`: python -m areal_core.library ERROR_FILE run ...

`command.py` says how it is connected to the program that has called `train`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from areal_core.background import start_thread
from areal_core.cli import main
from areal_core.errors import ArealError, ConfigError


def _end_with_caller() -> None:
    """Stop the run, after a checkpoint, when the calling program is gone: then its end of the pipe is closed."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _program(error_file: Path, words: list[str]) -> int:
    """Run `areal`. Write an error into a file, for the caller to raise it."""
    start_thread(_end_with_caller, "waiting for the end of the program that started the run")
    try:
        return main([*words, "--debug"])  # with --debug errors are raised
    except ArealError as error:
        problem = {
            "types": [kind.__name__ for kind in type(error).__mro__],
            "message": error.message,
            "hints": error.hints,
            "problems": error.problems if isinstance(error, ConfigError) else (),
        }
        error_file.write_text(json.dumps(problem), encoding="utf-8")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_program(Path(sys.argv[1]), sys.argv[2:]))
