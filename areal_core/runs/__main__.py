"""One process of a run: `python -m areal_core.runs ROLE RUN_DIR [ADDRESS]`.

It reads the run folder's config, loads the same plugins in the same way as every other process, and plays its role.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config.imports import KeptSources
from areal_core.runs.folder import RunFolder
from areal_core.runs.link import run_role

if TYPE_CHECKING:
    from areal_core.runs.link import Link

ROLES = ("preparer", "controller", "trainer", "workflow_worker")


def main(role: str, run_dir: Path, *arguments: str) -> int:
    """Play a role to its end; the exit code."""
    assert role in ROLES, role
    KeptSources.folder = RunFolder(run_dir).sources

    def play(link: Link) -> int:
        """The role's module is imported when the link beats already: torch may take long to import."""
        code: int = importlib.import_module(f"areal_core.runs.{role}").play(RunFolder(run_dir), link, *arguments)
        return code

    return run_role(play)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
