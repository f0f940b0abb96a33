"""Every path in a run folder, and the files in it that several programs read."""

from __future__ import annotations

import errno
import json
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from areal_core.config.resolve import CONFIG_FILE
from areal_core.disk import read_steps
from areal_core.errors import UsageError

RECOVERING = "recovering"
"""Outcome of an attempt after which the same program begins another one."""


def cache_folder() -> Path:
    """Return the folder for what outlives runs, such as prepared models: `AREAL_CACHE`, or `~/.cache/areal`."""
    return Path(os.environ.get("AREAL_CACHE") or Path("~/.cache/areal").expanduser())


def require_place(what: str, folder: Path, hint: str) -> None:
    """Raise `UsageError` if a folder cannot be created and does not exist. What this creates is removed again.

    Args:
        what: the folder's name in the error, such as `the run folder`.
        folder: the folder.
        hint: hint of the error.

    Example:
        >>> from pathlib import Path
        >>> from areal_core.errors import UsageError
        >>> from areal_core.programs import require_place
        >>> try:
        ...     require_place("the run folder", Path("/dev/null/run"), "choose another: run_dir=PATH")
        ... except UsageError as error:
        ...     print(error.message)
        the run folder /dev/null/run cannot be made: Not a directory
    """
    created: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not path.exists():
                path.mkdir()
                created.append(path)
        if not folder.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    except OSError as error:
        raise UsageError(f"{what} {folder} cannot be made: {error.strerror}", hints=[hint]) from None
    finally:
        with suppress(OSError):  # keep a folder if another program has written to it since
            for path in reversed(created):
                path.rmdir()


class _Below:
    """A path below a folder. The line after each use documents it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: AttemptFolder | RunFolder, owner: object) -> Path:
        return folder.path / self._name


class Outcome(NamedTuple):
    """How an attempt has ended: the content of the file `released`.

    Attributes:
        word: done, interrupted or failed; recovering if the same program has begun another attempt.
        steps: that the run was to do; 0 if unknown.
        exit_code: of the program; 0 if unknown as well.
    """

    word: str
    steps: int = 0
    exit_code: int = 0

    @classmethod
    def parse(cls, text: str) -> Outcome | None:
        """Return the outcome in a text, such as `interrupted 100 143`; None if the text is empty."""
        if not text.split():
            return None
        word, *numbers = text.split()
        steps, exit_code, *_ = *(int(number) for number in numbers if number.isdecimal()), 0, 0
        return cls(word, steps, exit_code)

    def __str__(self) -> str:
        numbers = [str(number) for number in (self.steps, self.exit_code) if number]
        return " ".join([self.word, *numbers])


@dataclass(frozen=True, slots=True)
class DriverNote:
    """The content of `driver.json`: the program that drives an attempt.

    Attributes:
        address: of its hub.
        host: name of its machine.
        process: its identity there.
    """

    address: str
    host: str
    process: str


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The folder of one attempt. Only processes of this attempt write there.

    Attributes:
        run: the run folder.
        number: of the attempt, from 1.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.programs import AttemptFolder, RunFolder
        >>> note = '{"address": "tcp:10.0.0.1:4711", "host": "node-1", "process": "boot-id/pid-namespace 42 7"}'
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     attempt: AttemptFolder = RunFolder(Path(folder)).attempt(1)
        ...     attempt.path.mkdir(parents=True)
        ...     _ = attempt.driver.write_text(note)  # as a driver does when it starts the run
        ...     print(attempt.read_driver().host, attempt.exit_code)  # the driver runs, or was killed
        ...     _ = attempt.released.write_text("interrupted 100 143")  # as it does after SIGTERM
        ...     print(attempt.exit_code)
        node-1 None
        143
    """

    run: Path
    number: int

    driver = _Below("driver.json")
    """The program that drives the attempt: JSON of `DriverNote`."""
    token = _Below("token")
    """The run's secret, readable by its user only. Every process reads it here, to show that it sees the folder."""
    released = _Below("released")
    """Exists when the driver has ended in order: an `Outcome` as text."""
    ledger = _Below("ledger")
    """The folder of the ledger."""
    segments = _Below("segments")
    """Trajectories that rollout workers have written for the trainer."""
    checkpoints = _Below("checkpoints")
    """A folder for each checkpoint."""
    weights = _Below("weights")
    """Weights that are synced through the disk."""

    @property
    def path(self) -> Path:
        """The folder itself. It exists if the attempt has, or had, a driver."""
        return self.run / "attempts" / str(self.number)

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt has ended; None if its driver has not ended in order, or is just writing the file."""
        try:
            return Outcome.parse(self.released.read_text(errors="replace"))
        except OSError:
            return None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the run; None if its driver has not ended in order, or continues in another attempt."""
        outcome = self.outcome
        if outcome is None or outcome.word == RECOVERING:
            return None
        return 0 if outcome.word == "done" else outcome.exit_code or 1

    def read_driver(self) -> DriverNote:
        """Return `address`, `host` and `process` of the attempt's driver. The file is complete if the folder exists."""
        return DriverNote(**json.loads(self.driver.read_text()))

    def has_done(self, steps: int) -> bool:
        """Return whether the driver has ended with so many steps done."""
        return self.outcome == Outcome("done", steps)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run.

    Example:
        >>> from pathlib import Path
        >>> from areal_core.programs import AttemptFolder, RunFolder
        >>> run = RunFolder(Path("/shared/runs/math"))
        >>> run.log_path("trainer-0")
        PosixPath('/shared/runs/math/logs/trainer-0.log')
        >>> first: AttemptFolder = run.attempt(1)
        >>> first.checkpoints
        PosixPath('/shared/runs/math/attempts/1/checkpoints')
    """

    path: Path

    config = _Below(CONFIG_FILE)
    """The complete config."""
    plugins = _Below("plugins.json")
    """Plugins, versions and files that the run consists of."""
    sources = _Below("sources")
    """Copies of the files that the config names as components, from the start of the run."""
    functions = _Below("functions")
    """Functions of a notebook, as `areal_core.train()` has written them."""
    model_note = _Below("model_folder.txt")
    """The path of the model that a model source has prepared."""
    metrics = _Below("metrics.jsonl")
    """A JSON line for each step."""
    samples = _Below("samples.jsonl")
    """A few episodes for each weight version, a JSON line each."""
    report = _Below("report.html")
    """The HTML report, if a plugin writes one."""
    model = _Below("model")
    """The trained model as a Hugging Face folder, when all steps are done."""
    best = _Below("best")
    """The model with the best evaluation."""
    logs = _Below("logs")
    """The output of the processes."""

    @property
    def word(self) -> str:
        """Its path, quoted for the shell, for commands in messages."""
        return shlex.quote(str(self.path))

    def log_path(self, process: str) -> Path:
        """Return the file with the output of a process."""
        return self.logs / f"{process}.log"

    def attempt(self, number: int) -> AttemptFolder:
        """Return the folder of an attempt, which need not exist."""
        return AttemptFolder(self.path, number)

    def attempts(self) -> list[AttemptFolder]:
        """Return all attempts so far, the first one first."""
        numbers = sorted(int(path.name) for path in (self.path / "attempts").glob("[0-9]*") if path.name.isdigit())
        return [self.attempt(number) for number in numbers]

    @property
    def last_attempt(self) -> AttemptFolder | None:
        """The latest attempt; None if the run was never started."""
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def checkpoints(self) -> list[Path]:
        """Return the folders of all checkpoints of all attempts, the first one first."""
        return [path for attempt in self.attempts() for path in sorted(attempt.checkpoints.glob("step-*"))]

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint, 0 for one from before the first step; None without a checkpoint."""
        return max((int(path.name.rpartition("-")[2]) for path in self.checkpoints()), default=None)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps so far. `read_steps` says which lines it leaves out."""
        return read_steps(self.metrics)
