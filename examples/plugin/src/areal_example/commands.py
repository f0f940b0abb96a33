"""A command: `areal example count_steps RUN`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence


def count_steps(arguments: Sequence[str]) -> int:
    """Print how many steps a run has trained, and return the exit code."""
    parser = argparse.ArgumentParser("areal example count_steps")
    parser.add_argument("run", type=Path, help="folder of the run")
    print(len(open_run(parser.parse_args(arguments).run).metrics))
    return 0
