"""Batches of a data set's rows, for supervised fine-tuning and preferences. Nothing is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.data.batch import PackedBatch
from areal_core.data.digest import group_digests
from areal_core.data.sampler import PromptSampler
from areal_core.errors import RunError
from areal_core.interfaces.dataset import name_row, unlearnable
from areal_core.messages.rollouts import ResumePoint
from areal_core.training.source import Interrupted, TrainingBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.data.trajectory import Trajectory
    from areal_core.interfaces.dataset import Dataset
    from areal_core.ledger.store import Ledger


class ExampleSource:
    """A `BatchSource` of rows, which the algorithm's example tokenizer turns into sequences.

    Args:
        dataset: the rows.
        encode: an `ExampleTokenizer` with its tokenizer.
        config: of the run.
        ledger: records commits, as the rollout controller does in other runs.
        is_interrupted: returns whether the run was asked to stop.
    """

    def __init__(
        self,
        dataset: Dataset,
        encode: Callable[[Any], Sequence[Trajectory]],
        config: RunConfig,
        ledger: Ledger,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._dataset = dataset
        self._encode = encode
        self._batch_size = config.rollout.batch_size
        self._sampler = PromptSampler(len(dataset), config.seed, shuffle=config.shuffle)
        self._ledger = ledger
        self._is_interrupted = is_interrupted

    def resume_point(self) -> ResumePoint:
        """See `BatchSource.resume_point`."""
        return ResumePoint(self._ledger.committed_step, self._ledger.checkpoint, 0, self._ledger.checkpoint_digest)

    def next_batch(self, step: int) -> bytes:
        """See `BatchSource.next_batch`. Returns the sequences as `PackedBatch.to_bytes` writes them."""
        if self._is_interrupted():
            raise Interrupted
        numbers = range(step * self._batch_size, (step + 1) * self._batch_size)
        encoded = {number: encode_row(self._dataset, self._sampler[number][0], self._encode) for number in numbers}
        examples = {number: example for number, example in encoded.items() if example}
        if not examples:
            raise RunError(
                f"all {len(numbers)} rows of a batch were skipped as too long: raise "
                "algorithm.example_tokenizer.max_tokens"
            )
        batch = PackedBatch.from_trajectories([trajectory for example in examples.values() for trajectory in example])
        sizes = torch.tensor([len(example) for example in examples.values()])
        unit_index = torch.repeat_interleave(torch.arange(len(examples)), sizes)
        ids = torch.tensor(list(examples))[unit_index]
        skipped = torch.full((len(batch),), len(numbers) - len(examples))
        first = torch.full((len(batch),), numbers[0])
        batch = batch.with_sequences(
            group_id=ids, episode_id=torch.arange(len(batch)), skipped_rows=skipped, first_group=first
        )
        if len(batch) > len(examples):
            batch = batch.with_units(unit_index)
        return batch.to_bytes()

    def begin_evaluation(self) -> None:
        """Do nothing: a run that generates nothing cannot evaluate."""

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def commit(self, step: int, checkpoint: Path) -> None:
        """See `BatchSource.commit`."""
        self._ledger.commit(step, checkpoint, step * self._batch_size)

    def close(self) -> None:
        """See `BatchSource.close`."""
        self._ledger.close()


def read_examples(payload: bytes) -> TrainingBatch:
    """Return the batch of what `ExampleSource.next_batch` returned."""
    batch = PackedBatch.from_bytes(payload)
    ids = batch["group_id"].tolist()
    starts = [index for index in range(len(ids)) if index == 0 or ids[index] != ids[index - 1]]
    groups = [(ids[start], range(start, end)) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    metrics = {"batch/examples": len(groups), "batch/sequences": len(batch), "batch/tokens": batch.token_count}
    digests = group_digests(batch, groups)
    first, skipped = int(batch["first_group"][0]), int(batch["skipped_rows"][0])
    if skipped:
        metrics["batch/skipped_rows"] = skipped
        # Skipped rows are recorded with an empty digest, so that an audit does not take them for lost rows.
        digests |= {number: "" for number in range(first, first + len(groups) + skipped) if number not in digests}
    return TrainingBatch(batch, sorted(digests.items()), {name: float(value) for name, value in metrics.items()})


def encode_row(dataset: Dataset, index: int, encode: Callable[[Any], Sequence[Trajectory]]) -> Sequence[Trajectory]:
    """Return the sequences of a row; none if the example tokenizer skips it.

    Args:
        dataset: holds the row.
        index: of the row.
        encode: an `ExampleTokenizer` with its tokenizer.

    Raises:
        RunError: the example tokenizer refuses the row; the message names the row.
    """
    try:
        return encode(dataset[index])
    except Exception as error:
        raise RunError(f"{name_row(dataset, index)} {unlearnable(error)}") from error
