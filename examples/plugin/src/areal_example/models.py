"""A source of models: it makes a folder with a model, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from areal_core.plugins import register
from pydantic import Field


@register("models")
class LocalCopy:
    """Copy a model from a slow file system to the cache of this machine."""

    def __init__(self, folder: Annotated[Path, Field(description="Folder of the model.")]) -> None:
        self._folder = folder

    def prepare(self, cache: Path) -> Path:
        """Return the copy. It gets its name when it is complete, so that a killed copy is never used."""
        name = hashlib.sha256(str(self._folder.resolve()).encode()).hexdigest()[:16]
        target = cache / f"local-copy-{name}"
        if not target.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="local-copy-") as unfinished:
                made = shutil.copytree(self._folder, Path(unfinished) / "model")
                try:
                    os.rename(made, target)
                except OSError:  # another process was faster
                    if not target.is_dir():
                        raise
        return target
