"""Process groups that play a role of areal's own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.launcher import ProcessGroup

if TYPE_CHECKING:
    from pathlib import Path


def role_group(name: str, role: str, run_dir: Path, **fields: Any) -> ProcessGroup:
    """Return a group that plays a role of areal's own: `python -m areal_core.runs ROLE RUN_DIR`.

    Args:
        name: of the group.
        role: a role of `areal_core.runs`.
        run_dir: the folder of the run.
        fields: further fields of `ProcessGroup`.
    """
    return ProcessGroup(name, role, [sys.executable, "-m", "areal_core.runs", role, str(run_dir)], **fields)
