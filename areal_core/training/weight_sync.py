"""How new weights reach the servers: by a `WeightTransport`, and through a folder for servers that it does not reach.

    step      trainer                                       servers
    1  sync   transport.send, or write a folder     ──►     load the weights between two tokens, take the new version
    2         the next batch is waited for                  generate
    3  finish before the next sync, an evaluation           have all answered
              or a check

The sync through a folder returns once the folder is written: the servers load it while the trainer waits for its next
batch. A transport returns when the servers have the weights.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.prediction import shift_to_predictions
from areal_core.disk import writing
from areal_core.errors import RunError
from areal_core.interfaces.training import SelectiveEngine
from areal_core.interfaces.transport import TransferFailedError
from areal_core.messages.rollouts import (
    Begin,
    LogprobCheck,
    OfferFolder,
    SkipSync,
    Sleep,
    Synced,
    Unread,
)
from areal_core.training.collectives import barrier, broadcast_bytes, is_main
from areal_core.training.weights_file import WeightsFile, describe_weights, size_of, write_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from areal_core.config.sections import WeightSyncSection
    from areal_core.interfaces.inference import TensorDescription
    from areal_core.interfaces.training import TrainEngine
    from areal_core.interfaces.transport import WeightTransport
    from areal_core.runtime.rpc import Message
    from areal_core.training.rollout_client import RolloutClient

LOGPROB_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference between the servers' log-probabilities and the trainer's, by the dtype of synced weights."""
MAX_TOLERANCES = 5.0
"""Multiple of the tolerance at which the difference of one token is clipped in the log-probability check."""
KEPT_VERSIONS = 2
"""Versions of the weights that stay in folders. A server that syncs late may still read the one before the last."""
_FILE: Final = "model.safetensors"


class FolderTransport:
    """The choice of no transport: weights are synced through a folder alone, which `WeightSync` writes.

    Attributes:
        in_memory: whether the folder is in memory (`/dev/shm`) if the servers run on this machine.
    """

    in_memory: bool


class MemoryFolder(FolderTransport):
    """A folder in memory; in the run folder if memory is too small or servers run on other machines."""

    in_memory = True


class DiskFolder(FolderTransport):
    """A folder in the run folder."""

    in_memory = False


def write_weights_folder(engine: TrainEngine, folder: Path) -> None:
    """Write the weights that inference engines load to `folder/model.safetensors`; collective.

    The folder appears complete or not at all. A folder of this name is replaced.

    Args:
        engine: whose parameters are written, in the dtype that servers compute in.
        folder: the folder for `WeightUpdate.path`.

    Raises:
        DiskError: the disk refuses.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from areal_core.engines import TrainEngine, write_weights_folder
        >>> class Engine(TrainEngine):
        ...     def named_full_parameters(self):
        ...         yield "lm_head.weight", torch.zeros(2, 3)
        ...
        ...     named_meta_parameters = named_full_parameters
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     write_weights_folder(Engine(), Path(parent, "weights"))
        ...     [file.name for file in Path(parent, "weights").iterdir()]
        ['model.safetensors']
    """
    tensors, parameters = describe_weights(engine), engine.named_full_parameters()
    try:
        if is_main():
            with writing(f"weights in {folder.name}", folder.parent):
                _write_complete(folder, tensors, parameters)
    finally:
        deque(parameters, maxlen=0)  # collective: no rank may leave before the last tensor, even after an error
        barrier()


def _write_complete(
    folder: Path, tensors: Sequence[TensorDescription], parameters: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Write weights to a folder, which appears complete or not at all. Replace a folder of this name."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(temporary / _FILE, tensors, parameters)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def choose_folder(folders: Sequence[Path], size: int) -> Path:
    """Return the first folder with room for `size` bytes. If that is not the first one, the log says so.

    Raises:
        RunError: no folder has room.
    """
    too_small: list[str] = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free > size:
            if too_small:
                sys.stderr.write(f"weights of {size / 1e9:.1f} GB go to {folder}: only {', '.join(too_small)}\n")
            return folder
        too_small.append(f"{free / 1e9:.1f} GB are free in {folder}")
    raise RunError(
        f"there is no room for weights of {size / 1e9:.1f} GB: only {', '.join(too_small)}",
        hints=["make room there, or set weight_sync.transport to disk or broadcast"],
    )


class WeightFolder:
    """Writes an engine's parameters as safetensors, one folder for each version; the same on every rank.

    Args:
        engine: whose parameters are written.
        folders: where versions are written, in the first one that has room at that time. One in memory is for servers
            on this machine; for several machines it must be on a disk that all of them see.
        memory: the one of `folders` that is on a tmpfs, where a version that nobody reads any more is overwritten.
    """

    def __init__(self, engine: TrainEngine, folders: Sequence[Path], memory: Path | None = None) -> None:
        self._engine = engine
        self._folders = folders
        self._memory = memory
        self._written: deque[_Version] = deque()
        self._retired: _Version | None = None

    def write(self, version: int) -> Path | None:
        """Write the parameters and return their folder on the main rank, None on the others. Collective.

        The folder appears complete or not at all.

        Raises:
            RunError: no folder has room. DiskError: it cannot be written.
        """
        tensors = describe_weights(self._engine)
        parameters = self._engine.named_full_parameters()
        try:
            if not is_main():
                return None
            written = self._overwrite(version, parameters) or self._write_new(version, tensors, parameters)
            self._written.append(written)
            if len(self._written) > KEPT_VERSIONS:
                self._retire(self._written.popleft())
            return written.folder
        finally:
            # Gathers are collective: no rank may leave before the last tensor, even after an error.
            deque(parameters, maxlen=0)

    def close(self) -> None:
        """Remove all versions."""
        for version in filter(None, (self._retired, *self._written)):
            version.remove()
        self._written.clear()
        self._retired = None

    def _write_new(
        self, version: int, tensors: Sequence[TensorDescription], parameters: Iterator[tuple[str, torch.Tensor]]
    ) -> _Version:
        folder = choose_folder(self._folders, sum(map(size_of, tensors)))
        target = folder / f"version-{version}"
        with writing(f"weights of version {version}", folder):
            _write_complete(target, tensors, parameters)
            return _Version(target, WeightsFile(target / _FILE, tensors) if folder == self._memory else None)

    def _overwrite(self, version: int, parameters: Iterator[tuple[str, torch.Tensor]]) -> _Version | None:
        """Write into the retired version's file. Return None if there is none, or a server still reads it."""
        retired = self._retired
        if retired is None or retired.file is None:
            return None
        if retired.file.is_read():
            self._retired = None
            retired.remove()
            return None
        target = retired.folder.with_name(f"version-{version}")
        with writing(f"weights of version {version}", target.parent):
            retired.file.overwrite(parameters)
            retired.folder.rename(target)
        self._retired = None
        return _Version(target, retired.file)

    def _retire(self, version: _Version) -> None:
        """Hide a version from servers that have not opened it; then it can be overwritten."""
        if version.file is None:
            version.remove()
            return
        hidden = version.folder.with_name(f".{version.folder.name}")
        version.folder.rename(hidden)
        self._retired = _Version(hidden, version.file)


class _Version(NamedTuple):
    """A version of the weights on disk or in memory.

    Attributes:
        folder: folder of the version.
        file: the file in it, which can be overwritten; None outside memory.
    """

    folder: Path
    file: WeightsFile | None

    def remove(self) -> None:
        if self.file is not None:
            self.file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class WeightSync:
    """Syncs an engine's parameters to the servers, the same on every rank. All methods are collective.

    Args:
        section: settings.
        engine: whose parameters are synced.
        rollouts: connection to the rollout controller, on the main rank; None on other ranks.
        transport: sends weights; None if they go through a folder alone.
        folder: writes weights for servers that the transport does not reach.

    Attributes:
        version: of the weights that were synced last.
    """

    def __init__(
        self,
        section: WeightSyncSection,
        engine: TrainEngine,
        rollouts: RolloutClient | None,
        transport: WeightTransport | None,
        folder: WeightFolder,
    ) -> None:
        self._section = section
        self._engine = engine
        self._rollouts = rollouts
        self._transport = transport
        self._folder = folder
        self._pending: Future[Any] | None = None  # reply to a sync through a folder
        self._syncs = 0
        self.version = 0

    def begin(self, version: int, trained: int) -> None:
        """Let generation begin, with the engine's parameters as `version`. On return the first requests are made.

        Args:
            version: 0 if the servers have loaded the same weights already.
            trained: batches that they were trained on.
        """
        self.version = version
        if isinstance(self._engine, SelectiveEngine):
            self._call(Unread(tuple(self._engine.unread_weights())))
        if version:
            self._sync_through_folder(trained)
            self.finish()
        self._call(Begin())

    def sync(self, trained: int) -> int:
        """Sync the parameters, which were trained on `trained` batches, and return their new version.

        The servers may still be loading them on return. The next sync, and all that depends on the weights, waits for
        them in `finish`.
        """
        self.finish()
        self.version += 1
        self._syncs += 1
        if self._transport is None:
            self._sync_through_folder(trained)
            return self.version
        try:
            needs_folder = self._transport.send(self.version, trained)
        except TransferFailedError:
            self._sync_through_folder(trained)
            return self.version
        if needs_folder:
            self.offer_folder()
        return self.version

    def offer_folder(self) -> None:
        """Write the weights that were synced last into a folder, for servers that missed them.

        The parameters must still be those that were synced: call it before the next batch is trained on.
        """
        folder = self._folder.write(self.version)
        if folder is not None:
            self._call(OfferFolder(self.version, folder))

    def skip(self, trained: int) -> None:
        """Record that after `trained` batches the parameters are still those that were synced last."""
        self.finish()
        self._call(SkipSync(trained))

    def finish(self) -> None:
        """Wait until the servers generate with the weights that were synced last."""
        reply, self._pending = self._pending, None
        if reply is not None and self._rollouts is not None:
            answer = self._rollouts.wait(reply)
            assert isinstance(answer, Synced)

    def sleep(self) -> None:
        """Let the servers release their memory for the trainer. Every rank returns after they have."""
        self.finish()
        self._call(Sleep())
        barrier()

    def check_logprobs(self, dtype: str) -> dict[str, float]:
        """Compare the servers' log-probabilities with the trainer's, and return metrics of the differences.

        This happens after the first sync, and then every `logprob_check_every` syncs. The mean over the tokens of each
        server's weights is compared with the tolerance. The difference of a token is clipped at `MAX_TOLERANCES` times
        the tolerance: in bfloat16 single tokens of a healthy server differ by 2 nats.

        Args:
            dtype: of the synced weights; decides about the tolerance if `logprob_tolerance` is not set.

        Raises:
            RunError: a server does not hold the weights that were synced.
        """
        every = self._section.logprob_check_every
        if self._syncs > 1 and (not every or self._syncs % every):
            return {}
        limit = self._section.logprob_tolerance or LOGPROB_TOLERANCES[dtype]
        self.finish()
        answers = self._call(LogprobCheck())
        batch = shift_to_predictions(PackedBatch.from_bytes(broadcast_bytes(answers.packed if is_main() else b"")))
        computed = self._engine.forward(batch, ["logprobs"])["logprobs"]
        counts = batch["loss_mask"]
        differences = (batch["logprobs"] - computed).abs()[counts]
        clipped, server = differences.clamp(max=MAX_TOLERANCES * limit), batch["copy"][counts]
        worst = float(torch.stack([clipped[server == number].mean() for number in set(server.tolist())]).max())
        if not worst <= limit:  # true for NaN as well
            raise RunError(
                f"the inference engine does not hold the weights that were synced: its log-probabilities differ by "
                f"{worst:.4f} on average from the trainer's (weight_sync.logprob_tolerance is {limit:g})",
                hints=["search its log for parameters that it did not load; a wrong dtype has the same effect"],
            )
        return {
            "logprob_check/difference_clipped": worst,
            "logprob_check/difference_mean": float(differences.mean()),
            "logprob_check/difference_p99": float(differences.quantile(0.99)),
            "logprob_check/difference_max": float(differences.max()),
        }

    def close(self) -> None:
        """Remove the folders that were written."""
        self._folder.close()

    def _sync_through_folder(self, trained: int) -> None:
        folder = self._folder.write(self.version)
        if self._rollouts is not None:
            self._pending = self._rollouts.sync_weights(self.version, trained, folder=folder)

    def _call(self, message: Message) -> Any:
        """Send a request and return its reply on the main rank; None on the others, which do not wait."""
        return None if self._rollouts is None else self._rollouts.call(message)
