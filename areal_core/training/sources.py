"""The two sources of batches: the rollout controller, or a data set as it is."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.sampler import PromptSampler
from areal_core.data.trajectory import FinishReason, Trajectory
from areal_core.errors import RunError
from areal_core.interfaces.inference import BroadcastGroup
from areal_core.interfaces.source import Interrupted
from areal_core.ledger.store import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.dataset import Dataset
    from areal_core.interfaces.inference import TensorDescription
    from areal_core.training.client import RolloutClient


class RolloutSource:
    """Batches from the rollout controller."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._publication: int | None = None
        self.needs_folder = False

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

    def release_engines(self) -> None:
        """See `BatchSource.release_engines`."""
        self._finish_publication()
        self._client.call("release")

    def probe(self) -> PackedBatch | None:
        """See `BatchSource.probe`."""
        self._finish_publication()
        return PackedBatch.from_bytes(self._client.call("probe").payload)

    def form_group(self, address: str, port: int, backend: str, standing: str) -> BroadcastGroup | None:
        """See `BroadcastTarget.form_group`."""
        self._finish_publication()
        told = self._client.call("form_group", address=address, port=port, backend=backend, standing=standing).fields
        if told["group"] is None:
            return None
        return BroadcastGroup(**{**told["group"], "prefixes": tuple(told["group"]["prefixes"])})

    def begin_broadcast(self, version: int, trained: int, tensors: Sequence[TensorDescription]) -> None:
        """See `BroadcastTarget.begin_broadcast`."""
        described = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in tensors]
        self._publication = self._client.request(
            "publish", version=version, trained=trained, path="", tensors=described
        )

    def broadcast_failed(self) -> bool:
        """See `BroadcastTarget.broadcast_failed`: a reply before the end of the broadcast can but be an error."""
        return self._publication is not None and self._client.has_failed(self._publication)

    def end_broadcast(self) -> None:
        """See `BroadcastTarget.end_broadcast`."""
        self._finish_publication()

    def drop_broadcast(self) -> None:
        """See `BroadcastTarget.drop_broadcast`."""
        with suppress(RunError):
            self._finish_publication()
        self._publication = None

    def offer_folder(self, version: int, folder: Path) -> None:
        """See `BroadcastTarget.offer_folder`."""
        self._client.call("offer_folder", version=version, path=str(folder))

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
        number, self._publication = self._publication, None
        if number is not None:
            self.needs_folder = bool(self._client.wait(number).fields.get("needs_folder"))


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

    def release_engines(self) -> None:
        """Nobody generates."""

    def probe(self) -> PackedBatch | None:
        """Nobody generates."""
        return None

    def evaluate(self) -> dict[str, float]:
        """Nobody generates, so nothing can be scored."""
        return {}

    def commit(self, step: int, checkpoint: str) -> None:
        """See `BatchSource.commit`."""
        self._ledger.commit(step, checkpoint, step * self._batch_size)

    def close(self) -> None:
        """See `BatchSource.close`."""
        self._ledger.close()
