"""The process that makes or fetches the model before anything else starts.

Its command is `python -m areal_core.driver.model_initialization RUN_DIR`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.checks.preflight import check_made_model
from areal_core.config import load_run
from areal_core.errors import RunError
from areal_core.files import KeptSources
from areal_core.interfaces.model import ModelResolver
from areal_core.runtime.folder import RunFolder, cache_folder
from areal_core.runtime.member import run_role
from areal_core.runtime.terminal import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from areal_core.config.selection import Selection
    from areal_core.interfaces.model import ModelSource
    from areal_core.runtime.member import Member


def run_preparation(run: RunFolder, member: Member) -> int:
    """Let the config's model source prepare the model, check it, and record its folder. Return the exit code."""
    resolved = load_run(run.path)
    source = resolved.config.model.source
    assert source is not None
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the cache {cache} cannot be made: {error.strerror}", hints=["set AREAL_CACHE"]) from None
    with member.phase("preparing the model", silence_s=0.0):
        folder = prepare_model(source, cache, log)
    with member.phase("checking the model and rows of the data", silence_s=0.0):
        check_made_model(resolved, folder, run.path, log)
        run.model_note.write_text(str(folder))
    return 0


def prepare_model(selection: Selection, cache: Path, log: Callable[[str], None]) -> Path:
    """Return the folder of a model. Runs that start concurrently make it once.

    Args:
        selection: the model source.
        cache: the folder where it makes its models.
        log: called with the process to wait for, if another one prepares the same model.
    """
    source: ModelSource = selection.build()
    folder = source.find(cache) if isinstance(source, ModelResolver) else None
    if folder is not None:
        return folder
    text = json.dumps(selection.to_tree(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    with _lock(cache / f".preparing-{digest}", log):
        return source.prepare(cache)


@contextmanager
def _lock(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a file lock. The kernel releases it when the process ends. The file names the holder for other processes."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held_s = max(0.0, time.time() - path.stat().st_mtime)
            holder = path.read_text(errors="replace") or "another process"
            log(f"waiting for {holder}, which has prepared this model for {held_s:.0f} s ({path})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


if __name__ == "__main__":
    RUN = RunFolder(Path(sys.argv[1]))
    KeptSources.use(RUN.sources)
    sys.exit(run_role(lambda member: run_preparation(RUN, member)))
