"""Between rank 0 of the trainer, which asks, and the rollout controller, which answers. Fields are the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_core.interfaces.inference import BroadcastGroup, SharedTensor, TensorDescription
from areal_core.interfaces.record import Record
from areal_core.messages.frames import Message


class WhereToBegin(Message):
    """Where does the run begin? Answered with `Beginning`."""


class Beginning(Message):
    """What every rank begins with.

    Attributes:
        step: batches that the restored parameters were trained on.
        checkpoint: folder of the committed checkpoint, None where the run begins with the model itself.
        version: the weight version to sync first; 0 where the engines have loaded the same weights themselves.
        digest: of the committed checkpoint, see `areal_core.ledger.store.checkpoint_digest`; for rank 0 alone.
    """

    step: int
    checkpoint: Path | None
    version: int
    digest: str = ""


class Begin(Message):
    """The first weights are synced; generation may begin. Answered with `Done`."""


class NextBatch(Message):
    """The batch of a step, please. Answered with `Manifest`."""

    step: int


class Manifest(Message):
    """What a batch is made of: every rank reads the records itself.

    Attributes:
        step: batches trained before it.
        records: of its groups with data, in their order, by number.
        synced: for each weight version of its tokens, the batches trained when it was synced.
        metrics: of the rollouts since the batch before.
    """

    step: int
    records: tuple[tuple[int, Record], ...]
    synced: Mapping[int, int]
    metrics: Mapping[str, float]


class SyncWeights(Message):
    """New weights: those in a folder, those that the trainer broadcasts to the group that stands, or those that were
    read in the memory of its GPUs.

    Answered with `Synced` when the engines generate with them.

    Attributes:
        version: of the weights.
        trained: batches that they were trained on.
        folder: holds `model.safetensors`; None where there is no file.
        tensors: what is broadcast, in this order, or was read.
    """

    version: int
    trained: int
    folder: Path | None
    tensors: tuple[TensorDescription, ...] = ()


class ReadTensors(Message):
    """A part of the weights of a version, in the memory of the trainer's GPUs: none at first, and the last part is
    followed by `SyncWeights`. Answered with `Readers`."""

    version: int
    tensors: tuple[SharedTensor, ...]


class Readers(Message):
    """The GPUs on which the next part will be read."""

    gpus: tuple[int, ...]


class Synced(Message):
    """The engines generate with the weights.

    Attributes:
        needs_folder: somebody missed the broadcast and waits for the same weights in a folder.
    """

    needs_folder: bool


class SkipSync(Message):
    """The synced weights stay those of the policy: a batch taught others alone. Answered with `Done`.

    Attributes:
        trained: batches so far, this one included.
    """

    trained: int


class FormGroup(Message):
    """Agree on a group for the next broadcast. Answered with `GroupFormed`.

    Attributes:
        address, port: where the trainer serves the store of a new group.
        backend: `nccl` or `gloo`.
        current_group: name of the group that the trainer is in, empty for none; it is kept where it still fits.
    """

    address: str
    port: int
    backend: str
    current_group: str


class GroupFormed(Message):
    """The group; None where nobody could receive."""

    group: BroadcastGroup | None


class OfferFolder(Message):
    """The weights of the last broadcast are complete in a folder. Answered with `Done`."""

    version: int
    folder: Path


class Sleep(Message):
    """The engines give their memory to the trainer until the next weight sync. Answered with `Done`."""


class LogprobCheck(Message):
    """Ask every copy of the synced weights a few fixed requests; answered with `LogprobCheckAnswers`."""


class LogprobCheckAnswers(Message):
    """Answers to the requests of `LogprobCheck`, as `PackedBatch.to_bytes` writes them."""

    packed: bytes


class Evaluate(Message):
    """Evaluate the synced weights. Answered with `Evaluated`."""


class Evaluated(Message):
    """Metrics of an evaluation."""

    metrics: Mapping[str, float]


class Commit(Message):
    """The checkpoint of `step` batches is complete in `folder`: from now on a resume starts there.

    Answered with `Done`.
    """

    step: int
    folder: Path


class Goodbye(Message):
    """The trainer needs nothing more. Answered with `Done`."""


# Asked by others than the trainer, through the driver.


class AuditLedger(Message):
    """Hold the ledger against the trainer's consumption log. Answered with `Audited`."""


class Audited(Message):
    """The audit of a run in progress; `report` is what `areal audit --json` writes."""

    report: Mapping[str, Any]
