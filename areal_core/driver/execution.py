"""A run from request to end: check, claim, start, watch, recover, release, summarize.

execute
 ├── check       `checks.preflight`: code, config, model, data and memory; nothing is written
 ├── `_Execution.drive`, in an event loop
 │    ├── claim        `claim_run`: the next folder below `attempts/`, and the files that a resume needs
 │    ├── start, watch `_run_attempt`: the processes of the run, until the trainer has finished
 │    ├── recover      `_recover`: after a loss, the next attempt begins from the last commit
 │    └── release      `_release`: the outcome, for programs that come later
 └── summarize   `_log_summary`
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.checks.fingerprints import model_records, saved_records, write_records
from areal_core.checks.preflight import preflight
from areal_core.config.launching import launching
from areal_core.diagnostics import Split, bottleneck, write_notes
from areal_core.disk import DiskError, replace_durably, writing
from areal_core.driver.groups import model_group, process_groups, split_optional
from areal_core.driver.resume_hint import resume_hint
from areal_core.errors import LostError, RunError, UsageError
from areal_core.files import KeptSources
from areal_core.plugins.provenance import Provenance
from areal_core.runs.models import model_paths
from areal_core.runtime.attempts import claim, next_attempt, release, require_no_driver
from areal_core.runtime.folder import RECOVERING, Outcome, RunFolder, require_place
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.progress import Progress, summarize_run
from areal_core.runtime.restart_policy import AttemptPolicy
from areal_core.runtime.supervisor import Supervisor
from areal_core.runtime.terminal import Terminal, log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from areal_core.checks.preflight import Preflight
    from areal_core.config import Resolved
    from areal_core.interfaces.launcher import Launcher, ProcessGroup
    from areal_core.runtime.folder import AttemptFolder
    from areal_core.runtime.rpc import Credentials

MODEL_STOP_TIMEOUT_S = 1.0
"""Seconds for the process that prepares the model to stop after a signal. It has nothing to keep."""


def execute(
    resolved: Resolved,
    *,
    run_dir: Path | None = None,
    resume: Path | None = None,
    dry_run: bool = False,
    allow_changes: bool = False,
    as_json: bool = False,
    show: Callable[[str], None] = log,
) -> int:
    """Run a config to its end, or print the plan.

    Args:
        resolved: the config.
        run_dir: folder of a new run.
        resume: folder of a run to resume. Exactly one of the two is set.
        dry_run: print the plan, start nothing and wait for no other driver.
        allow_changes: resume even if the run's code, data or models have changed.
        as_json: print the plan as one JSON object.
        show: prints the plan, and raises if that fails.

    Returns:
        The exit code: 0 if the run is done, 128 plus the number of the signal that interrupted it.

    Raises:
        ArealError: the request was wrong (exit code 2, nothing is left on disk) or the run failed (1).
    """
    folder = resume if resume is not None else run_dir
    assert folder is not None, "execute needs run_dir or resume"
    run = RunFolder(folder.resolve())
    is_resume = resume is not None
    if not is_resume:
        require_place("the run folder", run.path, "choose another: run_dir=PATH")
    if dry_run:
        require_no_driver(run)
        if not _is_done(resolved, run):
            plan = _preflight(resolved, run, starts=False, is_resume=is_resume, allow_changes=allow_changes)
            show(plan.to_json() if as_json else str(plan))
        return 0
    attempt = next_attempt(run, log)
    if _is_done(resolved, run):
        return 0
    launcher: Launcher = resolved.config.launcher.build()
    try:
        plan = _preflight(resolved, run, starts=True, is_resume=is_resume, allow_changes=allow_changes)
    except BaseException:
        asyncio.run(launcher.close())
        raise
    lost_steps = len(run.read_metrics()) if is_resume and run.last_step is None else 0
    if lost_steps:
        log(f"the run in {run.path} has no checkpoint: it begins again, and its first {lost_steps} steps are lost")
    resolved.plugins.events.configure(resolved.config)
    began_at, steps_before = time.monotonic(), run.last_step or 0
    with closing(Terminal()) as terminal:
        execution = _Execution(resolved, run, launcher, terminal)
        code = asyncio.run(execution.drive(attempt, plan.records, plan.notes))
    if code == 0:
        _log_summary(resolved, run, time.monotonic() - began_at, steps_before)
    return code


def _is_done(resolved: Resolved, run: RunFolder) -> bool:
    """Return whether a run has done all its steps and has exported its model. Log it if so.

    Raises:
        UsageError: the run has done more steps than the config asks for.
    """
    steps, done = resolved.config.steps, run.last_step or 0
    if done > steps:
        hint = f"for more: areal run --resume {run.word} steps={2 * done}"
        raise UsageError(f"the run has done {done} steps already, and steps is {steps}", hints=[hint])
    is_exported = run.model.is_dir() or not resolved.config.checkpoint.export
    if run.last_attempt is None or not run.last_attempt.has_done(steps) or not is_exported:
        return False
    log(f"the run is done, with all its {steps} steps; for more: areal run --resume {run.word} steps={2 * steps}")
    return True


def _preflight(resolved: Resolved, run: RunFolder, **options: bool) -> Preflight:
    """Check everything that the run needs; see `preflight` for the options and the errors."""
    return preflight(resolved, run, process_groups(resolved.config, Path()), **options)


class _Execution:
    """Drives a run to its end, in as many attempts as it takes.

    Args:
        resolved: its config.
        run: its folder.
        launcher: starts its processes.
        terminal: for messages to the user.
    """

    def __init__(self, resolved: Resolved, run: RunFolder, launcher: Launcher, terminal: Terminal) -> None:
        config = resolved.config
        self._resolved = resolved
        self._run = run
        self._terminal = terminal
        self._log = terminal.log
        self._events = resolved.plugins.events
        self._events.log = self._events.on_silenced = terminal.log
        self._progress = Progress(run, config.steps, terminal.log)
        self._supervisor = Supervisor(launcher, run, self._progress.on_message, terminal.log)
        self._policy = AttemptPolicy(launching(config.launcher).max_attempts_without_checkpoint)
        self._address = ""
        self._claimed: AttemptFolder | None = None
        """The attempt that this program drives."""

    async def drive(self, attempt: AttemptFolder, records: Sequence[Provenance], notes: Sequence[str]) -> int:
        """Claim the run, drive it to its end and release it. Return the exit code.

        Args:
            attempt: to claim.
            records: what the run consists of, except a model that is yet to be prepared.
            notes: of the plan.
        """
        outcome = Outcome("failed", self._resolved.config.steps, 1)
        try:
            self._address = await self._supervisor.listen()
            self._supervisor.admit(attempt)
            claim_run(self._resolved, self._run, attempt, self._address, self._supervisor.credentials, records)
            self._claimed = attempt
            self._announce(attempt, notes)
            is_interrupted = await self._run_attempts() == ASKED_TO_STOP
            self._progress.update(self._supervisor.describe)
            if is_interrupted:
                number = (self._supervisor.signals or [signal.SIGINT])[0]
                outcome = outcome._replace(word="interrupted", exit_code=128 + number)
            else:
                outcome = outcome._replace(word="done", steps=_steps_done(self._resolved, self._run), exit_code=0)
        except RunError as error:
            is_interrupted = error.exit_code in {128 + number for number in self._supervisor.signals[:1]}
            outcome = outcome._replace(word="interrupted" if is_interrupted else "failed", exit_code=error.exit_code)
            self._explain(error, is_interrupted=is_interrupted)
            raise
        finally:
            await self._supervisor.close()
            self._release(outcome)
        if outcome.exit_code:
            kept = "after a checkpoint" if any(self._run.checkpoints()) else "before the first checkpoint"
            self._log(f"stopped {kept}; continue with: areal run --resume {self._run.word}")
        return outcome.exit_code

    def _announce(self, attempt: AttemptFolder, notes: Sequence[str]) -> None:
        """Log where the run is and what its plan notes. Let plugins know that it starts."""
        self._run.logs.mkdir(exist_ok=True)
        self._terminal.log_path = self._run.log_path("driver")
        self._log(f"run folder: {self._run.path}, attempt {attempt.number}")
        write_notes(self._run.path, notes)
        for note in notes:
            self._log(f"note: {note}")
        self._events.run_started(self._resolved.config, self._run.path)

    async def _run_attempts(self) -> int:
        """Run attempts until one ends without a loss. Return 0, or `ASKED_TO_STOP`."""
        while True:
            try:
                return await self._run_attempt()
            except LostError as error:
                if self._supervisor.signals:  # the run was about to stop: its last checkpoint counts
                    self._log(f"{error.message}; the run was about to stop")
                    return ASKED_TO_STOP
                await self._recover(error)

    async def _run_attempt(self) -> int:
        """Start the run's processes and watch them. Return 0, or `ASKED_TO_STOP`.

        Raises:
            LostError: a process was killed or hung, or a node was lost.
            RunError: a process failed.
        """
        supervisor, config = self._supervisor, self._resolved.config
        if config.model.source is not None and not self._run.model_note.is_file():
            code = await self._prepare_model()
            if supervisor.signals:
                return code or ASKED_TO_STOP
        required, optional = split_optional(config, process_groups(config, self._run.path))
        await supervisor.start(required, optional)
        code = await supervisor.watch("trainer", lambda: self._progress.update(supervisor.describe))
        await supervisor.end_others(code)
        return code

    async def _prepare_model(self) -> int:
        """Run the process that makes or fetches the model, and record the model. Return 0, or `ASKED_TO_STOP`."""
        group = model_group(self._run.path)
        await self._supervisor.start([group])
        code = await self._supervisor.watch(group.role, self._progress.update_preparation, MODEL_STOP_TIMEOUT_S)
        if not self._supervisor.signals:
            self._supervisor.mark_done(group.role)
            records = [*saved_records(self._run), *model_records(self._run, {})]
            write_records(self._run, {record.name: record for record in records}.values())
        return code

    async def _recover(self, error: LostError) -> None:
        """End an attempt that has lost something, and claim the next one.

        Args:
            error: says what was lost.

        Raises:
            RunError: too many attempts were lost in a row, or another program drives the run by now.
        """
        former, latest = self._claimed, self._run.last_attempt
        assert former is not None
        if latest != former:
            raise error
        checkpoint = max((path.name for path in self._run.checkpoints()), default="")
        self._log(self._policy.after_loss(error, checkpoint))
        await self._supervisor.end_attempt(keeps=self._outlives_attempt)
        following = self._run.attempt(former.number + 1)
        self._supervisor.admit(following)
        claim(following, self._address, self._supervisor.credentials)
        release(former, str(Outcome(RECOVERING)))
        self._claimed = following
        self._progress.drop_steps()

    def _outlives_attempt(self, group: ProcessGroup) -> bool:
        """Return whether a group continues in the next attempt: servers, unless their weights may be swapped out."""
        return group.is_server and not self._resolved.config.takes_turns

    def _explain(self, error: RunError, *, is_interrupted: bool) -> None:
        """Write an error to the driver's log, and add a hint how to continue.

        Raises:
            RunError: the cause is another program that has taken over the run.
        """
        self._terminal.keep(error.message)
        if self._claimed is None:
            return
        if self._run.last_attempt != self._claimed:
            raise RunError(
                f"another process has taken over the run in {self._run.path} while this program was stopped or "
                "could not be reached; it has ended its own processes"
            ) from error
        if not any("areal run --resume" in hint for hint in error.hints):  # the error may know a better way
            error.hints = (*error.hints, resume_hint(self._run, has_failed=not is_interrupted))

    def _release(self, outcome: Outcome) -> None:
        """Record the outcome in the run folder, and let plugins know."""
        if self._claimed is None:
            return
        release(self._claimed, str(outcome))
        if self._run.last_attempt == self._claimed:
            number = next(iter(self._supervisor.signals), 0)
            self._events.run_finished(self._run.path, outcome.word, number)


def claim_run(
    resolved: Resolved,
    run: RunFolder,
    attempt: AttemptFolder,
    address: str,
    credentials: Credentials,
    records: Sequence[Provenance],
) -> None:
    """Make this program the driver of a run, and write what a resume needs into its folder.

    Raises:
        UsageError: another program was quicker, or a file of the user has changed since it was checked.
        DiskError: the disk refuses. A new run leaves nothing, so that it can be started again.
    """
    is_new = not run.path.exists()
    claim(attempt, address, credentials)
    try:
        write_run_folder(resolved, run, records)
    except (DiskError, UsageError) as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
            if isinstance(error, DiskError):
                error.hints = (*error.hints[:-1], "nothing was started: fix it, then run again")
        raise


def write_run_folder(resolved: Resolved, run: RunFolder, records: Sequence[Provenance] | None = None) -> None:
    """Write what a run consists of into its folder, so that `areal run --resume` can start or resume it.

    A kill in between leaves some files as they were before. Until all are written, their former records stay beside the
    new ones, so that the next resume accepts each file in either state.

    Args:
        resolved: the config.
        run: the run folder, which need not exist.
        records: what the run consists of; by default the plugins and files that the config names.

    Raises:
        UsageError: a file of the user has changed since the record of it was made.
        DiskError: the disk refuses.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.config import load_run, resolve
        >>> from areal_core.programs import RunFolder, write_run_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder(Path(folder) / "run")
        ...     resolved = resolve("grpo/addition", overrides=["steps=20"])
        ...     write_run_folder(resolved, run)
        ...     load_run(run.path).config.steps
        20
    """
    records = resolved.provenance() if records is None else records
    sources = dict(_read_sources(run, records))
    models = {record.name: record.location for record in records if record.name in model_paths(resolved.config)}
    text = resolved.to_yaml(models).encode()
    config = Provenance(run.config.name, "", "", str(run.config), hashlib.sha256(text).hexdigest())
    new_records = [config, *records]
    former_records = saved_records(run) if run.plugins.is_file() else []
    with writing("the run folder", run.path):
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.sources.mkdir(exist_ok=True)
        names = {record.name for record in new_records}
        write_records(run, [*(record for record in former_records if record.name in names), *new_records])
        for copy, source in sources.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(copy, source)
        replace_durably(run.config, text)
    write_records(run, new_records)


def _read_sources(run: RunFolder, records: Iterable[Provenance]) -> Iterator[tuple[Path, bytes]]:
    """Yield the user's files that a run executes: where the run keeps each, and its content.

    Raises:
        UsageError: a file is not the one that was checked.
    """
    for record in records:
        path = Path(record.location)
        is_source = record.is_own and path.is_absolute()  # the record of a data set has the text of the config
        if not is_source or not path.is_file():  # a file that is gone has a copy from an earlier start
            continue
        source = path.read_bytes()
        if hashlib.sha256(source).hexdigest() != record.source_hash:
            raise UsageError(f"{path} was changed while it was checked", hints=["run again"])
        yield KeptSources.place(run.sources, path, record.name), source


def _log_summary(resolved: Resolved, run: RunFolder, seconds: float, steps_before: int) -> None:
    log(summarize_run(run, _steps_done(resolved, run), seconds, steps_before))
    advice = bottleneck(run.read_metrics(), Split.of(resolved.config))
    if advice:
        log(advice)


def _steps_done(resolved: Resolved, run: RunFolder) -> int:
    """Return the last step of a run that has ended in order: fewer than the config's if a plugin has stopped it."""
    metrics = run.read_metrics()
    return min(int(metrics[-1]["step"]), resolved.config.steps) if metrics else resolved.config.steps
