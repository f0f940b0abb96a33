"""Sampled completions as rows of a table that trackers show."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from areal_core.config import load_run
from areal_core.programs import RunFolder, load_tokenizer, model_reference

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data import PackedBatch

COLUMNS: Final = ("step", "group_id", "sample_index", "prompt", "completion", "reward", "advantage")


class Completions:
    """Table rows of a run's completions.

    Args:
        run_dir: folder of the run.
        every: training steps between tables; 0: no tables.
    """

    def __init__(self, run_dir: Path, every: int) -> None:
        self._run_dir = run_dir
        self._every = every

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(model_reference(load_run(self._run_dir), RunFolder(self._run_dir)))

    def rows(self, step: int, batch: PackedBatch) -> list[list[Any]]:
        """Return a row of `COLUMNS` for each sequence, or no rows if the step gets no table.

        Args:
            step: step of the batch.
            batch: batch from the hook `areal_batch_logged`.
        """
        if not self._every or step % self._every or "reward" not in batch:
            return []
        return [self._row(step, batch.select([row])) for row in range(len(batch))]

    def _row(self, step: int, sequence: PackedBatch) -> list[Any]:
        ids, sampled = sequence["input_ids"].tolist(), sequence["turn_ids"] >= 0
        # `turn_ids` are shifted: the value at the position before a token shows if the token was sampled.
        first = int(sampled.int().argmax()) + 1 if sampled.any() else len(ids)
        prompt, completion = self._tokenizer.decode(ids[:first]), self._tokenizer.decode(ids[first:])
        has_advantage = "advantages" in sequence and bool(sampled.any())
        advantage = float(sequence["advantages"][sampled].mean()) if has_advantage else None
        identifiers = int(sequence["group_id"]), int(sequence["sample_index"])
        return [step, *identifiers, prompt, completion, float(sequence["reward"]), advantage]
