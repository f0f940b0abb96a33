"""One process of a run: `python -m areal_core.runs ROLE RUN_DIR`.

It joins the driver's hub, reads the run folder's config, loads the same plugins in the same way as every other process,
and plays its role.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.launchers.member import run_role

if TYPE_CHECKING:
    from areal_core.launchers.member import Member

ROLES = ("controller", "trainer", "rollout_worker", "server")


def main(role: str, run_dir: Path) -> int:
    """Play a role to its end; the exit code."""
    assert role in ROLES, role

    def play(member: Member) -> int:
        """What takes long to import, as torch does, is imported when the process beats already."""
        import importlib

        from areal_core.files import KeptSources
        from areal_core.runs.folder import RunFolder

        run = RunFolder(run_dir)
        KeptSources.use(run.sources)
        code: int = importlib.import_module(f"areal_core.runs.{role}").play(run, member)
        return code

    return run_role(play)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
