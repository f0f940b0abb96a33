"""The role that makes or fetches the model's folder, before anything else starts."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

from areal_core.config import load_run
from areal_core.runs.folder import cache_folder

if TYPE_CHECKING:
    from areal_core.runs.folder import RunFolder
    from areal_core.runs.link import Link


def play(run: RunFolder, link: Link) -> int:
    """Ask the config's source for the model, and note where it lies."""
    source = load_run(run.path).config.model.source
    assert source is not None
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    # Runs that start at the same time make a model once; the lock goes with its process, however that ends.
    with link.phase("prepare"), (cache / ".preparing").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = source.build().prepare(cache)
    run.model_note.write_text(str(folder))
    return 0
