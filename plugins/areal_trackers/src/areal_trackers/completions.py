"""What the policy wrote, as rows of a table that trackers show."""

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
    """The rows of a run.

    Args:
        run_dir: of the run.
        every: steps between tables; 0 for none.
    """

    def __init__(self, run_dir: Path, every: int) -> None:
        self._run_dir, self._every = run_dir, every

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(model_reference(load_run(self._run_dir), RunFolder(self._run_dir)))

    def rows(self, step: int, batch: PackedBatch) -> list[list[Any]]:
        """A row of `COLUMNS` for each sequence; none where the step has no table.

        Args:
            step: of the batch.
            batch: as the hook `areal_batch_logged` gives it.
        """
        if not self._every or step % self._every or "reward" not in batch:
            return []
        return [self._row(step, batch.select([row])) for row in range(len(batch))]

    def _row(self, step: int, one: PackedBatch) -> list[Any]:
        ids, sampled = one["input_ids"].tolist(), one["turn_ids"] >= 0
        # Shifted: the place before a token says whether it was sampled.
        first = int(sampled.int().argmax()) + 1 if sampled.any() else len(ids)
        prompt, completion = self._tokenizer.decode(ids[:first]), self._tokenizer.decode(ids[first:])
        known = "advantages" in one and bool(sampled.any())
        advantage = float(one["advantages"][sampled].mean()) if known else None
        whose = int(one["group_id"]), int(one["sample_index"])
        return [step, *whose, prompt, completion, float(one["reward"]), advantage]
