"""A run, by its folder: what it is doing, its metrics, the answers of its policy, its model, and its resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.disk import read_lines
from areal_core.errors import RunError, UsageError
from areal_core.ledger.store import DATABASE, read_training_order
from areal_core.library.command import resume_command
from areal_core.library.table import Table
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.status import IN_PROGRESS, SHOWN_METRICS, run_status

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class Run:
    """A run that was started by `train` or by `areal run`. Everything is read from its folder when it is asked for.

    A run that is in progress in another program can be read as well: `areal_core.open_run("runs/mine").metrics`.

    Args:
        folder: folder of the run.

    Attributes:
        folder: the same, as an absolute path.

    Raises:
        UsageError: the folder has no run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder).resolve()
        self._files = RunFolder(self.folder)
        if not self._files.config.is_file():
            raise UsageError(
                f"{folder} is not a run folder: it has no {self._files.config.name}",
                hints=["name the folder that train() or `areal run` printed first"],
            )

    @property
    def status(self) -> str:
        """What the run is doing: running, done, interrupted or failed.

        `recovering` is between two attempts. `lost` is a run whose driver was killed. `unreachable` is a run whose
        driver does not answer, such as one on another machine.
        """
        return str(run_status(self._files)["state"])

    @property
    def metrics(self) -> Table:
        """The metrics of each step so far: a row per step, with `step` from 1. docs/reference/metrics.md lists them."""
        return Table(self._files.read_metrics(), printed=("step", *SHOWN_METRICS))

    def samples(self, step: int | None = None) -> Table:
        """Return answers of the policy: a few of the first prompt group that ended under each weight version.

        Args:
            step: only those that this training step has learned from; None returns all.

        Returns:
            A row per answer, with these columns: `step` (int, from 1; None if no step has trained on it, or the run is
            in progress), `version` (int, weight version when its group ended), `data_row` (int or None, row of the data
            set), `prompt` and `answer` (str; an empty `prompt` and the whole text as `answer` if the workflow does not
            tell them apart), `reward` (float), and `rewards` (a dictionary of the components by name).

        Raises:
            RunError: `step` is given, and the run is in progress: its ledger cannot be read by a second program.
        """
        order: Mapping[tuple[int, str | None], tuple[int, int | None]] = {}
        attempts = self._files.attempts()
        ledgers = [attempt.ledger for attempt in attempts if (attempt.ledger / DATABASE).is_file()]
        is_in_progress = bool(attempts) and self.status in IN_PROGRESS
        if ledgers and not is_in_progress:
            order = read_training_order(ledgers[-1])
        elif step is not None:
            raise RunError(
                "samples of a step come from the ledger, which the run holds while it is in progress",
                hints=["samples() without a step works now; or stop the run first"],
            )
        rows = []
        for group in read_lines(self._files.samples):
            data_row, trained_at = order.get((group["group"], group.get("digest")), (None, None))
            for episode in group["episodes"] if step in (None, trained_at) else ():
                length = episode.get("prompt_length", 0)
                text = {"prompt": episode["text"][:length], "answer": episode["text"][length:]}
                rewards = {"reward": episode["reward"], "rewards": episode["rewards"]}
                rows.append({"step": trained_at, "version": group["version"], "data_row": data_row, **text, **rewards})
        return Table(rows, printed=("step", "version", "prompt", "answer", "reward"))

    @property
    def model(self) -> Path:
        """Folder of the trained model, as `transformers.AutoModelForCausalLM.from_pretrained` loads it.

        Raises:
            RunError: the run has not exported it: it is not done, or `checkpoint.export` is false.
        """
        return self._exported(self._files.model, "exports its model when all its steps are done")

    @property
    def best(self) -> Path:
        """Folder of the model with the best held-out score.

        Raises:
            RunError: there is none: the run has no `evaluation`, or has not evaluated yet.
        """
        return self._exported(self._files.best, "exports its best model after an evaluation: set evaluation")

    def resume(self, *, allow_changes: bool = False, **changes: Any) -> Run:
        """Continue the run from its last checkpoint, and return it when it ends, as in `run.resume(steps=200)`.

        Args:
            allow_changes: resume although the run's code, data, models or config have changed.
            changes: config values that may change in the middle of a run, such as `steps=200` or
                `checkpoint={"every": 10}`, which leaves the other keys of that section as they are.

        Raises:
            ArealError: something may not change, or the run failed.
            KeyboardInterrupt: Ctrl-C has stopped the run, after a checkpoint.
        """
        resume_command(self.folder, changes, allow_changes=allow_changes)
        return self

    def _exported(self, folder: Path, when: str) -> Path:
        if folder.is_dir():
            return folder
        hint = f"the run is {self.status}, after {len(self.metrics)} steps; resume() continues it"
        raise RunError(f"there is no {folder}: a run {when}", hints=[hint])

    def __repr__(self) -> str:
        metrics = self.metrics
        last = f", step {metrics[-1]['step']}" if metrics else ""
        return f"Run({str(self.folder)!r}): {self.status}{last}"

    def __fspath__(self) -> str:
        return str(self.folder)


def open_run(folder: str | os.PathLike[str]) -> Run:
    r"""Return the run in a folder, to read its results or to resume it.

    Raises:
        UsageError: the folder has no run.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from areal_core.library import Run, open_run
        >>> metrics = '{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.5}\n'
        >>> with TemporaryDirectory() as folder:  # stands for "runs/mine", which a run has written
        ...     _ = Path(folder, "config.yaml").write_text("steps: 2\n")
        ...     _ = Path(folder, "metrics.jsonl").write_text(metrics)
        ...     run: Run = open_run(folder)
        ...     run.metrics["reward/mean"]
        [0.25, 0.5]
    """
    return Run(folder)
