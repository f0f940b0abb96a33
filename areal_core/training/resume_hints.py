"""What a run can go on from; without torch, for whoever only looks at a run."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from areal_core.disk import changed_files

if TYPE_CHECKING:
    from pathlib import Path

STATE_FILE = "trainer.json"


def lost_files(folder: Path) -> str:
    """Files of a checkpoint that are missing or have another size, in words; none is read but their list."""
    path = folder / STATE_FILE
    try:
        return "; ".join(changed_files(folder, json.loads(path.read_text()).get("files", {})))
    except (OSError, ValueError, AttributeError) as error:
        return f"{path} cannot be read: {error}"


def resume_hints(folder: Path) -> list[str]:
    """What helps where a checkpoint cannot be loaded: an older one, or that there is none."""
    run = folder.parents[3] if len(folder.parents) > 3 else folder.parent
    older = [path for path in run.glob("attempts/*/checkpoints/step-*") if path.name < folder.name]
    if older and folder.is_dir():
        latest = max(older, key=lambda path: (path.name, int(path.parents[1].name)))
        aside, resume = shlex.join(["mv", str(folder), str(run / f"damaged-{folder.name}")]), shlex.quote(str(run))
        return [
            f"an older one is kept: {latest}; put this one aside, and the run goes back to it: "
            f"{aside} && areal run --resume {resume}"
        ]
    best = f"; {run / 'best'} holds the model of the best evaluation" if (run / "best").is_dir() else ""
    message = (
        "no older one is kept" if folder.is_dir() else "bring it back: the ledger knows of no older one that is kept"
    )
    return [f"{message}; areal run --resume cannot go on without, so start again with another run_dir{best}"]
