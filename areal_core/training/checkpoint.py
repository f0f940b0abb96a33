"""Checkpoints: complete or not there, and counted only once the ledger has committed them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from areal_core.data.digest import group_digests

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.training import TrainEngine


@dataclass(slots=True)
class Witness:
    """What the trainer itself saw of each step: group numbers and digests, to hold the ledger against.

    Attributes:
        steps: for each trained batch a list of [group number, digest of its token ids].
    """

    steps: list[list[tuple[int, str]]] = field(default_factory=list)

    def saw(self, batch: PackedBatch | None) -> None:
        """A batch is about to be trained on."""
        if batch is None:
            self.steps.append([])
            return
        ids = batch["group_id"].tolist()
        starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
        groups = [(ids[a], range(a, b)) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
        self.steps.append(sorted(group_digests(batch, groups).items()))


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint that a resume starts from."""

    step: int
    folder: Path

    @classmethod
    def find(cls, run_dir: Path) -> Committed | None:
        """The last one that the ledger has committed; None where there is none yet."""
        database = run_dir / "ledger" / "ledger.sqlite"
        if not database.is_file():
            return None
        connection = sqlite3.connect(database)
        try:
            facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
        except sqlite3.OperationalError:  # killed before the ledger's tables were made
            return None
        finally:
            connection.close()
        if "checkpoint" not in facts:
            return None
        return cls(int(facts["committed_step"]), run_dir / "checkpoints" / facts["checkpoint"])

    def witness(self) -> Witness:
        """What the trainer had seen when it wrote this checkpoint."""
        state = json.loads((self.folder / "trainer.json").read_text())
        return Witness([[(number, digest) for number, digest in step] for step in state["witness"]])


def write_checkpoint(run_dir: Path, step: int, engine: TrainEngine, witness: Witness) -> str:
    """Write parameters, optimizer and what the trainer saw; collective. The caller commits it.

    Returns:
        The checkpoint's name. Written to a temporary folder, synced, then renamed.
    """
    is_first = dist.get_rank() == 0
    name = f"step-{step:06d}"
    target = run_dir / "checkpoints" / name
    temporary = target.with_name(f".{name}")
    if is_first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    engine.save(temporary)
    if is_first:
        (temporary / "trainer.json").write_text(json.dumps({"step": step, "witness": witness.steps}))
        _sync(temporary)
        shutil.rmtree(target, ignore_errors=True)  # of a history that a resume has discarded
        temporary.rename(target)
        _sync_folder(target.parent)
    dist.barrier()
    return name


def prune_checkpoints(run_dir: Path, keep: int, committed: str) -> None:
    """Delete all but the last `keep` checkpoints; never the committed one."""
    folder = run_dir / "checkpoints"
    for old in sorted(path for path in folder.iterdir() if path.name.startswith("step-"))[:-keep]:
        if old.name != committed:
            shutil.rmtree(old)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
