"""Checks and advice for checkpoints, without torch, for programs that only inspect a run."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from areal_core.disk import changed_files

if TYPE_CHECKING:
    from pathlib import Path

STATE_FILE = "trainer.json"


def lost_files(folder: Path) -> str:
    """Describe files of a checkpoint that are missing or have another size. Reads only the list of files."""
    path = folder / STATE_FILE
    try:
        return "; ".join(changed_files(folder, json.loads(path.read_text()).get("files", {})))
    except (OSError, ValueError, AttributeError) as error:
        return f"{path} cannot be read: {error}"


def resume_hints(folder: Path) -> list[str]:
    """Return advice for a checkpoint that cannot be loaded: use an older one, or start again if there is none."""
    run = folder.parents[3] if len(folder.parents) > 3 else folder.parent
    older = [path for path in run.glob("attempts/*/checkpoints/step-*") if path.name < folder.name]
    if older and folder.is_dir():
        latest = max(older, key=lambda path: (path.name, int(path.parents[1].name)))
        move, resume = shlex.join(["mv", str(folder), str(run / f"damaged-{folder.name}")]), shlex.quote(str(run))
        return [
            f"an older checkpoint is kept: {latest}; move this one away, and the run goes back to the older one: "
            f"{move} && areal run --resume {resume}"
        ]
    if folder.is_dir():
        message = "no older checkpoint is kept"
    else:
        message = "restore the folder: the ledger knows of no older checkpoint that is kept"
    best = f"; {run / 'best'} holds the model of the best evaluation" if (run / "best").is_dir() else ""
    return [f"{message}; without it areal run --resume cannot continue: start again with another run_dir{best}"]
