"""A source of models: it makes a folder with a model, once."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from areal_core.config import LocalPath  # noqa: TC002 - areal reads the annotation
from areal_core.plugins import register
from pydantic import Field


@register("models")
class LocalCopy:
    """Copy a model from a slow file system to the cache of this machine."""

    def __init__(self, folder: Annotated[LocalPath, Field(description="Folder of the model.")]) -> None:
        self._folder = folder

    def prepare(self, cache: Path) -> Path:
        """Return the copy. It gets its name when it is complete, so that a killed copy is never used."""
        stats = [(str(path), path.stat()) for path in sorted(self._folder.resolve().rglob("*")) if path.is_file()]
        state = repr([(name, found.st_size, found.st_mtime_ns) for name, found in stats])  # a changed model is copied
        target = cache / f"local-copy-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
        if not target.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished:
                shutil.copytree(self._folder, Path(unfinished) / "model").rename(target)
        return target
