"""Batches of a data set's own completions, for supervised fine-tuning: nothing is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.sampler import PromptSampler
from areal_core.data.trajectory import FinishReason, Trajectory
from areal_core.messages.rollouts import Beginning
from areal_core.training.source import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.dataset import Dataset
    from areal_core.ledger.store import Ledger


class SupervisedSource:
    """A `BatchSource` of rows with `prompt` (text) and `completion` (text), which the end-of-sequence token follows.

    Args:
        dataset: the rows.
        tokenizer: of the model.
        config: of the run.
        ledger: in which checkpoints are committed; there is no controller that would.
        is_interrupted: whether the run was asked to stop.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: Any, config: RunConfig, ledger: Ledger, is_interrupted: Callable[[], bool]
    ) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._batch_size = config.rollout.batch_size
        self._sampler = PromptSampler(len(dataset), config.seed, shuffle=config.shuffle)
        self._ledger = ledger
        self._is_interrupted = is_interrupted

    def where_to_begin(self) -> Beginning:
        """See `BatchSource.where_to_begin`."""
        return Beginning(self._ledger.committed_step, self._ledger.checkpoint, 0)

    def next_batch(self, step: int) -> tuple[PackedBatch | None, dict[str, float]]:
        """See `BatchSource.next_batch`."""
        if self._is_interrupted():
            raise Interrupted
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)
        batch = PackedBatch.from_trajectories([self._trajectory(number) for number in numbers])
        ids = torch.tensor(list(numbers))
        batch = batch.with_sequences(group_id=ids, episode_id=ids)
        return batch, {"batch/sequences": float(len(batch)), "batch/tokens": float(batch.token_count)}

    def evaluate(self) -> dict[str, float]:
        """Nobody generates, so nothing can be scored."""
        return {}

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        self._ledger.commit(step, checkpoint, step * self._batch_size)

    def close(self) -> None:
        """See `BatchSource.close`."""
        self._ledger.close()

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
