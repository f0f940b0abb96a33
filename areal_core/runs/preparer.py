"""The role that makes or fetches the model's folder, before anything else starts."""

from __future__ import annotations

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
    with link.phase("prepare"):
        folder = source.build().prepare(cache)
    run.model_note.write_text(str(folder))
    return 0
