"""Requests of the trainer's main rank to the rollout controller, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.interfaces.inference import BroadcastGroup, SharedTensor, TensorDescription
from areal_core.interfaces.record import Record
from areal_core.runtime.frames import Message


class AskResumePoint(Message):
    """Ask for the last commit. Answered with `ResumePoint`."""


class ResumePoint(Message):
    """The last commit, from which every rank starts.

    Attributes:
        step: number of batches that the restored parameters were trained on.
        checkpoint: folder of the committed checkpoint; None if the run begins with the model itself.
        version: weight version to sync first; 0 if the servers have loaded the same weights already.
        digest: digest of the committed checkpoint; see `areal_core.ledger.store.checkpoint_digest`.
    """

    step: int
    checkpoint: Path | None
    version: int
    digest: str = ""


class Begin(Message):
    """Start generation. The trainer sends it after the first weight sync. Answered with `Done`."""


class NextBatch(Message):
    """Ask for the batch of a step. Answered with `Manifest` or `FolderNeeded`."""

    step: int


class FolderNeeded(Message):
    """No batch is ready, and a server that missed the last sync waits for the same weights in a folder.

    The trainer offers the folder (`OfferFolder`) and asks for the batch again. Without this, no batch would ever be
    ready if all servers were lost after a broadcast.
    """


class Manifest(Message):
    """The records of a batch. Every rank reads them from disk.

    Attributes:
        step: number of batches trained before this one.
        records: number and record of each group that has data, in order.
        synced: for each weight version of its tokens, the number of batches trained when that version was synced.
        metrics: metrics of the rollouts since the previous batch.
    """

    step: int
    records: tuple[tuple[int, Record], ...]
    synced: Mapping[int, int]
    metrics: Mapping[str, float]


class SyncWeights(Message):
    """Load new weights: from a folder, from a broadcast, or from the memory of the trainer's GPUs (`ReadTensors`).

    Answered with `Synced` when the servers generate with the new weights.

    Attributes:
        version: weight version.
        trained: number of batches that the weights were trained on.
        folder: folder with `model.safetensors`; None for other transports.
        tensors: tensors that the trainer broadcasts, in this order, or that the servers have read.
    """

    version: int
    trained: int
    folder: Path | None
    tensors: tuple[TensorDescription, ...] = ()


class ReadTensors(Message):
    """Offer a part of the weights in the memory of the trainer's GPUs. Answered with `Readers`.

    The first offer has no tensors. `SyncWeights` follows the last one.
    """

    version: int
    tensors: tuple[SharedTensor, ...]


class Readers(Message):
    """The numbers of the GPUs whose servers will read the next part."""

    gpus: tuple[int, ...]


class Synced(Message):
    """The servers generate with the weights.

    Attributes:
        needs_folder: whether a server missed the weights and waits for them in a folder.
    """

    needs_folder: bool


class Unread(Message):
    """Name the tensors of the model's files that the trainer has not read, so that no weight sync contains them.

    The trainer sends it before the first weight sync. Answered with `Done`.
    """

    names: tuple[str, ...]


class SkipSync(Message):
    """Record that a batch has not changed the policy: it trained other roles only. Answered with `Done`.

    Attributes:
        trained: number of batches trained so far, including this one.
    """

    trained: int


class FormGroup(Message):
    """Agree on a broadcast group for the next weight sync. Answered with `GroupFormed`.

    Attributes:
        address, port: address of the trainer's store for a new group.
        backend: `nccl` or `gloo`.
        current_group: name of the trainer's current group; empty if it has none. The servers keep it if all are ready.
    """

    address: str
    port: int
    backend: str
    current_group: str


class GroupFormed(Message):
    """The broadcast group; None if no server can receive a broadcast."""

    group: BroadcastGroup | None


class OfferFolder(Message):
    """Offer the weights of the last sync in a folder to servers that missed the sync. Answered with `Done`."""

    version: int
    folder: Path


class Sleep(Message):
    """Let the servers release their memory to the trainer until the next weight sync. Answered with `Done`."""


class LogprobCheck(Message):
    """Let every server answer a few fixed prompts under the synced weights. Answered with `LogprobCheckAnswers`."""


class LogprobCheckAnswers(Message):
    """Answers to the requests of `LogprobCheck`, as `PackedBatch.to_bytes` writes them."""

    packed: bytes


class Evaluate(Message):
    """Evaluate the synced weights. Answered with `Evaluated`."""


class Evaluated(Message):
    """Metrics of an evaluation."""

    metrics: Mapping[str, float]


class Commit(Message):
    """Commit the checkpoint of `step` batches in `folder`: from now on a resume starts there. Answered with `Done`."""

    step: int
    folder: Path


class Goodbye(Message):
    """End the controller, because the trainer has finished. Answered with `Done`."""


# Requests of other processes, which the driver forwards.


class AuditLedger(Message):
    """Compare the ledger with the trainer's own record. Answered with `Audited`."""


class Audited(Message):
    """The audit of a run in progress. `report` is the output of `areal audit --json`."""

    report: Mapping[str, Any]
