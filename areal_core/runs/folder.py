"""Every path in a run folder."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_core.config import CONFIG_FILE
from areal_core.disk import read_steps


def cache_folder() -> Path:
    """What outlives runs, such as prepared models: `AREAL_CACHE`, by default below the user's own cache."""
    return Path(os.environ.get("AREAL_CACHE") or Path("~/.cache/areal").expanduser())


class _Below:
    """A path in a folder; what it is for stands behind it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: AttemptFolder | RunFolder, owner: object) -> Path:
        return folder.path / self._name


class Outcome(NamedTuple):
    """What came of an attempt.

    Attributes:
        word: done, interrupted, failed, or recovering where the same program has begun another attempt.
        steps: that the run was to do.
        exit_code: of the program; 0 also where it is not known.
    """

    word: str
    steps: int = 0
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """What one attempt at a run writes: nobody else ever writes there.

    Attributes:
        run: the run folder.
        number: of the attempt, from 1.
    """

    run: Path
    number: int

    driver = _Below("driver.json")
    """Who drives the attempt: JSON of `areal_core.driver.attempts.DriverNote`."""
    token = _Below("token")
    """The run's secret, readable by its user alone. Every process must have read it here: it sees the folder."""
    released = _Below("released")
    """There when the driver has ended in order; says what came of it, and of how many steps."""
    ledger = _Below("ledger")
    """The folder of the ledger."""
    segments = _Below("segments")
    """What rollout workers have written for the trainer."""
    checkpoints = _Below("checkpoints")
    """One folder a step."""
    weights = _Below("weights")
    """Weights that are synced through the disk."""

    @property
    def path(self) -> Path:
        """The folder itself; that it exists means that the attempt has a driver."""
        return self.run / "attempts" / str(self.number)

    @property
    def outcome(self) -> Outcome | None:
        """What came of the attempt; None where its driver has not ended in order, or is just writing this."""
        try:
            word, *numbers = self.released.read_text(errors="replace").split()
        except (OSError, ValueError):
            return None
        steps, code, *_ = *(int(number) for number in numbers if number.isdecimal()), 0, 0
        return Outcome(word, steps, code)

    def has_done(self, steps: int) -> bool:
        """Whether the driver has ended with so many steps done."""
        return self.outcome == Outcome("done", steps)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run."""

    path: Path

    config = _Below(CONFIG_FILE)
    """The complete config."""
    plugins = _Below("plugins.json")
    """Plugins, versions and files that the run is made of."""
    sources = _Below("sources")
    """The files that components were named by, as they were when the run started."""
    model_note = _Below("model_folder.txt")
    """Where the model lies that a source has made."""
    metrics = _Below("metrics.jsonl")
    """A JSON line a step."""
    samples = _Below("samples.jsonl")
    """A few episodes for each weight version, a JSON line each."""
    report = _Below("report.html")
    """The HTML report, where a plugin writes one."""
    model = _Below("model")
    """The trained model as a Hugging Face folder, when all steps are done."""
    best = _Below("best")
    """The model with the best evaluation."""
    logs = _Below("logs")
    """What the processes write."""

    @property
    def word(self) -> str:
        """Its path as a shell takes it, for commands that are told."""
        return shlex.quote(str(self.path))

    def log_path(self, process: str) -> Path:
        """What one process writes."""
        return self.logs / f"{process}.log"

    def attempt(self, number: int) -> AttemptFolder:
        """What one attempt writes."""
        return AttemptFolder(self.path, number)

    def attempts(self) -> list[AttemptFolder]:
        """All attempts so far, the first one first."""
        numbers = sorted(int(path.name) for path in (self.path / "attempts").glob("[0-9]*") if path.name.isdigit())
        return [self.attempt(number) for number in numbers]

    def checkpoints(self) -> list[Path]:
        """The folders of all checkpoints, of all attempts, the first one first."""
        return [path for one in self.attempts() for path in sorted(one.checkpoints.glob("step-*"))]

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint, 0 where that was made before the first; None without one."""
        return max((int(path.name.rpartition("-")[2]) for path in self.checkpoints()), default=None)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics so far; see `read_steps` for what is left out."""
        return read_steps(self.metrics)

    @property
    def last_attempt(self) -> AttemptFolder | None:
        """The latest attempt; None for a folder that was never started."""
        return next(reversed(self.attempts()), None)
