"""The files of a checkpoint: written completely or not at all, and verified before they are loaded.

    attempts/N/checkpoints/step-000120/
        actor/ ...               parameters, optimizer and schedule of each role that changes, written by its engine
        algorithm.safetensors    the algorithm's own tensors
        trainer.json             `TrainerState`, and size and digest of every other file

All ranks write into a hidden folder, which the main rank syncs to disk and renames. The checkpoint counts once the
ledger has committed it; see `Checkpointer`.
"""

from __future__ import annotations

import json
import shutil
import zlib
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal_core.disk import changed_files, file_digests, file_sizes, replacing_folder, sync_names
from areal_core.errors import RunError
from areal_core.ledger.store import checkpoint_digest
from areal_core.training.collectives import broadcast_text, is_main
from areal_core.training.resume_hints import STATE_FILE, resume_hints
from areal_core.training.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.interfaces.training import TrainEngine

ALGORITHM_FILE = "algorithm.safetensors"
"""Name of the file with the algorithm's own tensors."""


def write_checkpoint(
    checkpoints: Path, state: TrainerState, writers: Mapping[str, Callable[[Path], None]], barrier: Callable[[], None]
) -> Path:
    """Write a checkpoint and return its folder, complete and synced to disk; collective. The caller commits it.

    Args:
        checkpoints: folder of this attempt's checkpoints.
        state: a snapshot of the trainer's state.
        writers: for each role that learns or is an EMA, the engine's `save`, or what its `snapshot` returned.
        barrier: returns when every rank has called it.

    Raises:
        DiskError: a file cannot be written.
    """
    target = checkpoints / f"step-{state.step:06d}"
    with replacing_folder("a checkpoint", target, swaps=is_main()) as folder:
        if is_main():
            for role in writers:
                (folder / role).mkdir(parents=True)
        barrier()
        for role, write in writers.items():
            write(folder / role)
        barrier()
        if is_main():
            save_file(state.algorithm, folder / ALGORITHM_FILE)
            _write_state(folder, state)
            sync_names(checkpoints, checkpoints.parent)
    barrier()
    return target


def restore_checkpoint(folder: Path, engines: Mapping[str, TrainEngine], digest: str = "") -> TrainerState:
    """Load a checkpoint into the engines and return the trainer's state; collective.

    Beforehand the main rank reads every file, and compares it with the digest of what was written.

    Args:
        folder: of the checkpoint.
        engines: by role.
        digest: of the checkpoint that the run committed; known to the main rank. Empty if it is not known.

    Raises:
        RunError: the checkpoint is damaged or is not the committed one, with a hint how to resume; or an engine cannot
            load it.
    """
    if damage := broadcast_text(damage_of(folder, digest) if is_main() else ""):
        raise RunError(f"the checkpoint is damaged: {damage}", hints=resume_hints(folder))
    for role, engine in engines.items():
        engine.load(folder / role)
    return _read_state(folder)


def damage_of(folder: Path, digest: str = "") -> str:
    """Describe how a checkpoint differs from what was written; empty if it does not.

    Checkpoints of early versions of areal have no digests. Of these only the sizes are compared.
    """
    path = folder / STATE_FILE
    try:
        fields = json.loads(path.read_text())
        own_digest = fields.pop("digest", None)
        if own_digest not in (None, _digest(fields)):
            return f"{path} has other contents than were written"
        if digest not in ("", checkpoint_digest(folder)):
            return f"{folder} is not the checkpoint that the run committed"
        changed = changed_files(folder, fields.get("files", {}), fields.get("digests"))
        if not changed:
            _read_state(folder)
        return "; ".join(changed)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    except SafetensorError as error:
        return f"{folder / ALGORITHM_FILE} cannot be read: {error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path} cannot be read or is of another version: {type(error).__name__}: {error}"


def prune_checkpoints(run_dir: Path, keep: int, committed: Path) -> None:
    """Delete all checkpoints but the last `keep`, and the unfinished files of former attempts.

    Args:
        run_dir: of the run.
        keep: checkpoints to keep, the committed one among them.
        committed: folder of the latest checkpoint, which is one of this attempt.
    """
    attempt = _attempt_of(committed)
    checkpoints = [path for path in run_dir.glob("attempts/*/checkpoints/step-*") if _attempt_of(path) <= attempt]
    checkpoints.sort(key=lambda path: (_attempt_of(path), path.name))
    unfinished = [*run_dir.glob("attempts/*/checkpoints/.step-*"), *run_dir.glob("attempts/*/weights")]
    for path in [*checkpoints[:-keep], *(path for path in unfinished if _attempt_of(path) < attempt)]:
        if path != committed:
            shutil.rmtree(path)


def _write_state(folder: Path, state: TrainerState) -> None:
    fields = {**state.to_json(), "files": file_sizes(folder), "digests": file_digests(folder)}
    # The digest is of the fields as they are read back: JSON turns tuples into lists, and numbers as keys into texts.
    digest = _digest(json.loads(json.dumps(fields)))
    (folder / STATE_FILE).write_text(json.dumps({**fields, "digest": digest}))


def _read_state(folder: Path) -> TrainerState:
    fields = json.loads((folder / STATE_FILE).read_text())
    return TrainerState.from_json(fields, load_file(folder / ALGORITHM_FILE))


def _digest(fields: Mapping[str, Any]) -> int:
    """Return the digest of `trainer.json` itself, which holds the digests of the other files."""
    return zlib.crc32(json.dumps(fields).encode())


def _attempt_of(path: Path) -> int:
    """Return the number of the attempt whose folder holds a path."""
    return int(next(parent.name for parent in path.parents if parent.parent.name == "attempts"))
