"""The process that makes or fetches the model's folder, before anything else starts: `python -m ... RUN_DIR`."""

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

from areal_core.config import load_run
from areal_core.driver.checking import row_problems
from areal_core.driver.plan import check_model
from areal_core.driver.terminal import log
from areal_core.errors import RunError
from areal_core.files import KeptSources
from areal_core.interfaces.model import FindsModel
from areal_core.launchers.member import run_role
from areal_core.runs.folder import RunFolder, cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from areal_core.config.selection import Selection
    from areal_core.interfaces import ModelSource
    from areal_core.launchers.member import Member


def play(run: RunFolder, member: Member) -> int:
    """Ask the config's source for the model, and note where it lies."""
    resolved = load_run(run.path)
    chosen = resolved.config.model.source
    assert chosen is not None
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the cache {cache} cannot be made: {error.strerror}", hints=["set AREAL_CACHE"]) from None
    with member.phase("preparing the model", silence_s=0.0):
        folder = prepare_model(chosen, cache, log)
        check_model(resolved, folder, run.path)
        run.model_note.write_text(str(folder))
    with member.phase("checking rows of the data", silence_s=0.0):
        notes: list[str] = []
        problems = list(row_problems(resolved, run, notes))  # before this there was no tokenizer to check them with
        for note in notes:
            log(f"note: {note}")
        if problems:
            run.model_note.unlink()
            raise RunError("\n".join(problems))
    return 0


def prepare_model(chosen: Selection, cache: Path, log: Callable[[str], None]) -> Path:
    """The folder of a model, which runs that start at the same time make once.

    Args:
        chosen: the source.
        cache: where it makes its models.
        log: told whom it is waited for.
    """
    source: ModelSource = chosen.build()
    if isinstance(source, FindsModel) and (found := source.find(cache)) is not None:
        return found
    said = json.dumps(chosen.to_tree(), sort_keys=True)
    with _alone(cache / f".preparing-{hashlib.sha256(said.encode()).hexdigest()[:16]}", log):
        return source.prepare(cache)


@contextmanager
def _alone(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock, which goes with its process, however that ends; meanwhile the file says who has it, since when."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held_s = max(0.0, time.time() - path.stat().st_mtime)
            who = path.read_text(errors="replace") or "another process"
            log(f"waits for {who}, at this model for {held_s:.0f} s ({path})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


if __name__ == "__main__":
    RUN = RunFolder(Path(sys.argv[1]))
    KeptSources.use(RUN.sources)
    sys.exit(run_role(lambda member: play(RUN, member)))
