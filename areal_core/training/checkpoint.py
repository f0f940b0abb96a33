"""Checkpoints: complete or not there, and counted only once the ledger has committed them."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal_core.data.digest import chain_digests
from areal_core.disk import changed_files, file_digests, file_sizes, replacing_folder, sync_names
from areal_core.errors import RunError
from areal_core.ledger.store import checkpoint_digest
from areal_core.training.distribution import share_text
from areal_core.training.resume_hints import STATE_FILE, resume_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.interfaces.training import TrainEngine

ALGORITHM_FILE = "algorithm.safetensors"
"""Beside it: the algorithm's own tensors."""


@dataclass(slots=True)
class ConsumptionLog:
    """What the trainer itself saw of each step: group numbers and digests, to hold the ledger against.

    Attributes:
        before: one digest of all steps before `steps`, see `chain_digests`.
        first: how many these are.
        steps: for each trained batch since a list of (group number, digest of its record).
        best: the best score of an evaluation.
        unevaluated: metrics of the last step, where its evaluation has not ended and is to be made by a resume.
        state: tensors of the algorithm's own, see `Context.state`.
    """

    before: str = ""
    first: int = 0
    steps: list[list[tuple[int, str]]] = field(default_factory=list)
    best: float = -math.inf
    unevaluated: dict[str, float] | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def hand_over(self) -> ConsumptionLog:
        """All of it as it is now, for a checkpoint; what is kept here does not grow with the run.

        Raises:
            RunError: the algorithm keeps something in its state that is no tensor.
        """
        state = {name: _own(name, value) for name, value in self.state.items()}
        handed = replace(self, steps=[*self.steps], state=state)
        self._fold()
        return handed

    def _fold(self) -> None:
        for groups in self.steps:
            self.before = chain_digests(self.before, groups)
        self.first += len(self.steps)
        self.steps.clear()


def restore_checkpoint(folder: Path, engines: Mapping[str, TrainEngine], digest: str = "") -> ConsumptionLog:
    """Give every role that is in a checkpoint its parameters back; what the trainer had seen. Collective.

    Rank 0 reads all of it beforehand, and holds it against the digests of what was written.

    Args:
        folder: of the checkpoint.
        engines: by role.
        digest: of the checkpoint that was committed; rank 0 knows it. Empty where nobody does.

    Raises:
        RunError: an engine cannot load it; or it is another checkpoint, or a file of it is missing, cut off or changed:
            then it says what can be gone on with.
    """
    if damage := share_text(damage_of(folder, digest) if dist.get_rank() == 0 else ""):
        raise RunError(f"the checkpoint is damaged: {damage}", hints=resume_hints(folder))
    for role, engine in engines.items():  # what settings do not fit is refused of any step alike
        engine.load(folder / role)
    return _read_consumption_log(folder, json.loads((folder / STATE_FILE).read_text()))


def damage_of(folder: Path, digest: str = "") -> str:
    """What a checkpoint is not as it was written, in words; empty where nothing is. Older ones have no digests."""
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text())
        own = state.pop("digest", None)
        if own not in (None, _digest(state)):
            return f"{path} holds other bytes than were written"
        is_other = digest not in ("", checkpoint_digest(folder))
        other = [f"{folder} holds another checkpoint than the one that the run committed"] if is_other else []
        if changed := other or changed_files(folder, state.get("files", {}), state.get("digests")):
            return "; ".join(changed)
        _read_consumption_log(folder, state)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    except SafetensorError as error:
        return f"{folder / ALGORITHM_FILE} cannot be read: {error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{path} cannot be read or is of another version: {type(error).__name__}: {error}"
    return ""


def _read_consumption_log(folder: Path, state: Mapping[str, Any]) -> ConsumptionLog:
    best = -math.inf if state["best"] is None else state["best"]
    steps = [[(number, digest) for number, digest in step] for step in state["steps"]]
    own = load_file(folder / ALGORITHM_FILE)
    return ConsumptionLog(state["before"], state["first"], steps, best, state["unevaluated"], own)


def _digest(state: Mapping[str, Any]) -> int:
    """Of the file that holds the other files' digests."""
    return zlib.crc32(json.dumps(state).encode())


def write_checkpoint(
    checkpoints: Path,
    step: int,
    writers: Mapping[str, Callable[[Path], None]],
    consumption_log: ConsumptionLog,
    wait_for_all: Callable[[], None],
) -> Path:
    """Write parameters and optimizer of every role, and what the trainer saw; collective. The caller commits it.

    Args:
        checkpoints: the folder of all of them.
        step: batches that were trained on.
        writers: of each engine that learns or is an EMA, by role: `save`, or what its snapshot gave.
        consumption_log: as it was handed over after that step.
        wait_for_all: returns when every rank has come there.

    Returns:
        The checkpoint's folder, whole and synced.

    Raises:
        DiskError: the disk refuses.
    """
    is_first = dist.get_rank() == 0
    target = checkpoints / f"step-{step:06d}"
    with replacing_folder("a checkpoint", target, swaps=is_first) as folder:
        if is_first:
            for role in writers:
                (folder / role).mkdir(parents=True)
        wait_for_all()
        for role, write in writers.items():
            write(folder / role)
        wait_for_all()
        if is_first:
            best = consumption_log.best if math.isfinite(consumption_log.best) else None
            save_file(consumption_log.state, folder / ALGORITHM_FILE)
            seen = asdict(replace(consumption_log, state={}))
            state = {**seen, "step": step, "best": best, "files": file_sizes(folder), "digests": file_digests(folder)}
            # As it will be read: JSON knows neither tuples nor numbers as keys.
            digest = _digest(json.loads(json.dumps(state)))
            (folder / STATE_FILE).write_text(json.dumps({**state, "digest": digest}))
            sync_names(checkpoints, checkpoints.parent)
    wait_for_all()
    return target


def _own(name: str, value: object) -> torch.Tensor:
    """A tensor of the algorithm's state as safetensors can write it: whole, and sharing memory with no other."""
    if not isinstance(value, torch.Tensor):
        raise RunError(f"the algorithm keeps '{name}' in its state, which is not a tensor: {value!r:.80}")
    return value.detach().to("cpu", copy=True).contiguous()


def prune_checkpoints(run_dir: Path, keep: int, committed: Path) -> None:
    """Delete all but the last `keep` checkpoints of this attempt and former ones, and what former ones left half done.

    Args:
        run_dir: of the run.
        keep: checkpoints to keep, the committed one among them.
        committed: the latest one, of this attempt.
    """
    attempt = committed.parent.parent
    found = sorted(run_dir.glob("attempts/*/checkpoints/step-*"), key=lambda path: (_attempt(path), path.name))
    found = [path for path in found if _attempt(path) <= int(attempt.name)]
    left = [p for pattern in ("checkpoints/.step-*", "weights") for p in run_dir.glob(f"attempts/*/{pattern}")]
    for path in [*found[:-keep], *(p for p in left if _attempt(p) < int(attempt.name))]:
        if path != committed:
            shutil.rmtree(path)


def _attempt(path: Path) -> int:
    """The number of the attempt below whose folder a path lies."""
    return int(next(one.name for one in path.parents if one.parent.name == "attempts"))
