"""Where the trainer's batches come from: the rollout controller, or a data set as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from areal_core.data.batch import PackedBatch
from areal_core.data.trajectory import FinishReason, Trajectory
from areal_core.rollout.client import Interrupted
from areal_core.rollout.ledger import Ledger
from areal_core.rollout.sampler import PromptSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.interfaces.dataset import Dataset
    from areal_core.rollout.client import RolloutClient


class BatchSource(Protocol):
    """What the loop asks for on rank 0."""

    def first_version(self, step: int) -> int:
        """The weight version under which a run that starts at `step` publishes first.

        0 where nothing needs to be published: engines that load the model have the same weights already.
        """
        ...

    def begin(self, version: int, step: int, folder: Path | None) -> None:
        """Generation may begin, with the weights in `folder` where a first version is published."""
        ...

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """The batch of `step` and its metrics; None for a batch without data. Raises `Interrupted`."""
        ...

    def publish(self, version: int, trained: int, folder: Path) -> None:
        """Weights of `version`, from `trained` batches, are complete in `folder`."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Evaluate the published weights; empty where the source cannot."""
        ...

    def commit(self, step: int, checkpoint: str) -> None:
        """The named checkpoint of `step` batches is complete: from now on a resume starts there."""
        ...

    def close(self) -> None:
        """No further batch is needed."""
        ...


class RolloutSource:
    """Batches from the rollout controller."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._publication: int | None = None

    def first_version(self, step: int) -> int:
        """See `BatchSource.first_version`. A resumed run publishes above every version of its past."""
        highest = int(self._client.call("state").fields["highest_version"])
        return 0 if step == highest == 0 else highest + 1

    def begin(self, version: int, step: int, folder: Path | None) -> None:
        """See `BatchSource.begin`. On return the first requests are made, under these weights."""
        self._client.call("begin", version=version, trained=step, path=str(folder or ""))

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """See `BatchSource.next_batch`."""
        return self._client.next_batch(step)

    def publish(self, version: int, trained: int, folder: Path) -> None:
        """See `BatchSource.publish`. Returns at once; the next publication waits for this one."""
        self._finish_publication()
        self._publication = self._client.request("publish", version=version, trained=trained, path=str(folder))

    def evaluate(self) -> dict[str, float]:
        """See `BatchSource.evaluate`."""
        self._finish_publication()
        metrics: dict[str, float] = self._client.call("evaluate").fields["metrics"]
        return metrics

    def commit(self, step: int, checkpoint: str) -> None:
        """See `BatchSource.commit`."""
        self._client.call("commit", step=step, checkpoint=checkpoint)

    def close(self) -> None:
        """See `BatchSource.close`."""
        self._client.close()

    def _finish_publication(self) -> None:
        if self._publication is not None:
            self._client.wait(self._publication)
            self._publication = None


class SupervisedSource:
    """Batches of a data set's own completions, for supervised fine-tuning.

    A row has `prompt` (text) and `completion` (text); the completion ends with the end-of-sequence token.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Any,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        run_dir: Path,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._sampler = PromptSampler(len(dataset), seed, shuffle=shuffle)
        self._ledger = Ledger(run_dir)
        self._is_interrupted = is_interrupted

    def first_version(self, step: int) -> int:
        """Nobody generates."""
        return 0

    def begin(self, version: int, step: int, folder: Path | None) -> None:
        """Nobody generates."""

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """See `BatchSource.next_batch`."""
        if self._is_interrupted():
            raise Interrupted
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)
        batch = PackedBatch.from_trajectories([self._trajectory(number) for number in numbers])
        numbers_tensor = torch.tensor(list(numbers))
        batch = batch.with_sequences(group_id=numbers_tensor, episode_id=numbers_tensor)
        return batch, {"batch/sequences": float(len(batch)), "batch/tokens": float(batch.token_count)}

    def _trajectory(self, number: int) -> Trajectory:
        row = self._dataset[self._sampler[number][0]]
        prompt = self._encode(row, "prompt")
        answer = [*self._encode(row, "completion"), self._tokenizer.eos_token_id]
        count = len(prompt) + len(answer)
        tokens = {
            "input_ids": torch.tensor(prompt + answer),
            "loss_mask": torch.tensor([False] * len(prompt) + [True] * len(answer)),
            "logprobs": torch.zeros(count),
            "versions": torch.full((count,), -1, dtype=torch.int32),
            "turn_ids": torch.full((count,), -1, dtype=torch.int32),
        }
        return Trajectory(tokens, {"finish_reason": torch.tensor(int(FinishReason.STOP), dtype=torch.int8)})

    def _encode(self, row: Mapping[str, Any], key: str) -> list[int]:
        if key not in row:
            raise KeyError(f"fine-tuning needs rows with 'prompt' and 'completion'; this one has {', '.join(row)}")
        return list(self._tokenizer.encode(row[key], add_special_tokens=False))

    def publish(self, version: int, trained: int, folder: Path) -> None:
        """Nobody generates."""

    def evaluate(self) -> dict[str, float]:
        """Nobody generates, so nothing can be scored."""
        return {}

    def commit(self, step: int, checkpoint: str) -> None:
        """See `BatchSource.commit`."""
        self._ledger.commit(step, checkpoint, step * self._batch_size)

    def close(self) -> None:
        """See `BatchSource.close`."""
        self._ledger.close()


STOP, EMPTY = -1, 0


def distribute(result: tuple[PackedBatch | None, dict[str, float]] | None) -> PackedBatch | None:
    """Give rank 0's batch to all ranks, as bytes.

    Args:
        result: of `next_batch` on rank 0, None where the run shall stop; ignored on other ranks.

    Returns:
        The batch, or None for a batch without data.

    Raises:
        Interrupted: on every rank, where rank 0 has been asked to stop.
    """
    if dist.get_world_size() == 1:
        if result is None:
            raise Interrupted
        return result[0]
    data = b"" if result is None or result[0] is None else result[0].to_bytes()
    size = torch.tensor([STOP if result is None else len(data)])
    dist.broadcast(size, 0)
    if int(size) == STOP:
        raise Interrupted
    if int(size) == EMPTY:
        return None
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return PackedBatch.from_bytes(buffer.numpy().tobytes())
