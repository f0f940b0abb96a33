"""Run one process of a run: `python -m areal_core.runs ROLE RUN_DIR`.

The process joins the driver's hub, reads the config in the run folder, loads the same plugins as every other process,
and runs the main function of its role.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.runtime.member import run_role

if TYPE_CHECKING:
    from areal_core.runtime.member import Member

ROLES = ("controller", "trainer", "rollout_worker", "server")


def main(role: str, run_dir: Path) -> int:
    """Run a role until it ends. Return the exit code."""
    assert role in ROLES, role

    def play(member: Member) -> int:
        """Import the role late, when the process already sends heartbeats: torch takes seconds to import."""
        import importlib

        from areal_core.files import KeptSources
        from areal_core.runtime.folder import RunFolder

        run = RunFolder(run_dir)
        KeptSources.use(run.sources)
        code: int = importlib.import_module(f"areal_core.runs.{role}").play(run, member)
        return code

    return run_role(play)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
