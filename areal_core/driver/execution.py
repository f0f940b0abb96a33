"""A run from request to end: checked, claimed, started, watched, and told about."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config.launching import launching
from areal_core.diagnostics import Split, bottleneck, write_notes
from areal_core.disk import DiskError, replace_durably, writing
from areal_core.driver.attempts import RECOVERING, claim, next_attempt, release, require_no_driver
from areal_core.driver.checking import CodeCheck
from areal_core.driver.driver import Driver
from areal_core.driver.fingerprints import (
    check_unchanged,
    model_records,
    module_records,
    saved_records,
    write_provenance,
)
from areal_core.driver.groups import model_group, process_groups, split_optional
from areal_core.driver.plan import make_plan
from areal_core.driver.recoveries import Recoveries, resume_hint
from areal_core.driver.summary import summarize_run
from areal_core.driver.terminal import Terminal, log
from areal_core.driver.view import View
from areal_core.errors import LostError, RunError, UsageError
from areal_core.files import KeptSources
from areal_core.launchers.member import ASKED_TO_STOP
from areal_core.plugins import Provenance
from areal_core.runs.folder import RunFolder
from areal_core.runs.models import model_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.config import Resolved
    from areal_core.interfaces.launcher import Launcher
    from areal_core.runs.folder import AttemptFolder

MODEL_STOP_S = 1.0
"""For a model's source to end when it is told to stop: it has nothing to keep."""


def execute(
    resolved: Resolved,
    *,
    run_dir: Path | None,
    resume: Path | None,
    dry_run: bool,
    allow_changes: bool,
    as_json: bool = False,
    show: Callable[[str], None] = log,
) -> int:
    """Check, start, watch and end a run.

    Args:
        resolved: its config.
        run_dir: of a new run.
        resume: of a run to go on with; exactly one of the two is given.
        dry_run: print the plan and start nothing.
        allow_changes: resume although something has changed that the run is made of.
        as_json: print the plan as one JSON object.
        show: prints the plan, and raises where that fails.

    Returns:
        The exit code: 0 done, 128 and the number of the signal where it was interrupted after a checkpoint.

    Raises:
        ArealError: the request was wrong (exit code 2, nothing left on disk) or the run failed (1).
    """
    folder = resume if resume is not None else run_dir
    assert folder is not None
    run = RunFolder(folder.resolve())
    if dry_run:  # which waits for nothing
        require_no_driver(run)
    attempt = None if dry_run else next_attempt(run, log)
    done = run.last_step or 0
    if done > resolved.config.steps:
        more = f"for more: areal run --resume {run.word} steps={2 * done}"
        raise UsageError(f"the run has done {done} steps already, and steps is {resolved.config.steps}", hints=[more])
    steps, is_exported = resolved.config.steps, run.model.is_dir() or not resolved.config.checkpoint.export
    if run.last_attempt is not None and run.last_attempt.has_done(steps) and is_exported:
        log(f"the run is done, with all its {steps} steps; for more: areal run --resume {run.word} steps={2 * steps}")
        return 0
    launcher: Launcher | None = None if dry_run else resolved.config.launcher.build()
    try:
        with closing(CodeCheck(resolved)) as check:
            plan = make_plan(resolved, check, downloads=resume is not None or not dry_run, run_dir=run.path)
            records = [*resolved.provenance(), *plan.data, *module_records(check.modules)]
    except BaseException:
        if launcher is not None:
            asyncio.run(launcher.close())
        raise
    if resume is not None or not dry_run:
        records += model_records(run, {key: seen.folder for key, seen in plan.models.items() if seen})
    if resume is not None:
        check_unchanged(run, records, allowed=allow_changes)
    if launcher is None or attempt is None:
        show(plan.to_json() if as_json else str(plan))
        return 0
    if resume is not None and run.last_step is None and (lost := len(run.read_metrics())):
        log(f"the run in {run.path} has no checkpoint: it begins again, and its first {lost} steps are lost")
    resolved.plugins.events.configure(resolved.config)
    began = time.monotonic()
    with closing(Terminal()) as terminal:
        code = asyncio.run(_drive(resolved, run, attempt, launcher, terminal, records, plan.notes))
    if not code:
        log(summarize_run(run, steps, time.monotonic() - began, done))
        if waiting := bottleneck(run.read_metrics(), Split.of(resolved.config)):
            log(waiting)
    return code


async def _drive(
    resolved: Resolved,
    run: RunFolder,
    attempt: AttemptFolder,
    launcher: Launcher,
    terminal: Terminal,
    records: Sequence[Provenance],
    notes: Sequence[str],
) -> int:
    """Make the run this process's own, and bring it to its end, in as many attempts as it takes; the exit code.

    Args:
        resolved: its config.
        run: its folder.
        attempt: to claim.
        launcher: starts its processes.
        terminal: for the user.
        records: what the run is made of, but for a model that is yet to be made.
        notes: of its plan.
    """
    log = resolved.plugins.events.log = terminal.log
    view = View(run, resolved.config.steps, log)
    driver = Driver(launcher, run, view.on_message, log)
    recoveries = Recoveries(launching(resolved.config.launcher).max_attempts_without_checkpoint, log)
    outcome, code, owned = "failed", 1, None
    try:
        address = await driver.listen()
        driver.begin(attempt)
        _begin(resolved, run, attempt, address, driver, records)
        owned = attempt
        run.logs.mkdir(exist_ok=True)
        terminal.log_path = run.log_path("driver")
        log(f"run folder: {run.path}, attempt {attempt.number}")
        write_notes(run.path, notes)
        for note in notes:
            log(f"note: {note}")
        resolved.plugins.events.run_started(resolved.config, run.path)
        while (ended := await _attempt_or_lose(resolved, run, driver, view, recoveries)) is None:
            owned = _begin_again(run, owned, address, driver)
            view.begin_again()
        view.update(driver.describe)
        outcome, code = ("interrupted", 128 + (driver.signals or [signal.SIGINT])[0]) if ended else ("done", 0)
    except RunError as error:
        code = error.exit_code
        terminal.keep(error.message)
        if driver.signals and code == 128 + driver.signals[0]:
            outcome = "interrupted"
        if owned is not None and run.last_attempt != owned:
            raise RunError(
                f"another process has taken over the run in {run.path} while this program was stopped or "
                "could not be reached; it has ended its own processes"
            ) from error
        if owned is not None and not any("areal run --resume" in hint for hint in error.hints):  # it may know better
            error.hints = (*error.hints, resume_hint(run, has_failed=outcome != "interrupted"))
        raise
    finally:
        await driver.close()
        if owned is not None:
            release(owned, f"{outcome} {resolved.config.steps}{f' {code}' if code else ''}")
            if run.last_attempt == owned:
                resolved.plugins.events.run_finished(run.path, outcome, next(iter(driver.signals), 0))
    if not code:
        return 0
    stopped = "stopped after a checkpoint" if any(run.checkpoints()) else "stopped before the first checkpoint"
    log(f"{stopped}; continue with: areal run --resume {run.word}")
    return code


def _begin(
    resolved: Resolved,
    run: RunFolder,
    attempt: AttemptFolder,
    address: str,
    driver: Driver,
    records: Sequence[Provenance],
) -> None:
    """Make the run this process's own, and keep what it is made of.

    Raises:
        UsageError: somebody else was quicker.
        DiskError: the disk refuses; a new run leaves nothing, so that it can be started again.
    """
    is_new = not run.path.exists()
    claim(attempt, address, driver.credentials)
    try:
        write_down(resolved, run, records)
    except DiskError as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
            error.hints = (error.hints[0], "nothing was started: fix it, then run again")
        raise


def write_down(resolved: Resolved, run: RunFolder, records: Sequence[Provenance]) -> None:
    """Write what a run is made of into its folder, from which `areal run --resume` starts it, or goes on with it.

    A kill in between leaves some files as they were before. So their former records stay beside the new ones until all
    are written, and the next resume finds each file as one of the two.

    Raises:
        DiskError: the disk refuses.
    """
    found = {record.name: record.location for record in records if record.name in model_paths(resolved.config)}
    text = resolved.to_yaml(found).encode()
    config = Provenance(run.config.name, "", "", str(run.config), hashlib.sha256(text).hexdigest())
    new = [config, *records]
    former = saved_records(run) if run.plugins.is_file() else []
    with writing("the run folder", run.path):
        run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.sources.mkdir(exist_ok=True)
        names = {record.name for record in new}
        write_provenance(run, [*(record for record in former if record.name in names), *new])
        for record in records:
            if record.is_own and (path := Path(record.location)).is_file():  # else there are copies of before
                place = KeptSources.place(run.sources, path, record.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                replace_durably(place, path.read_bytes())
        replace_durably(run.config, text)
    write_provenance(run, new)


def _begin_again(run: RunFolder, former: AttemptFolder, address: str, driver: Driver) -> AttemptFolder:
    """The next attempt, which this same program drives."""
    latest = run.attempt(former.number + 1)
    driver.begin(latest)
    claim(latest, address, driver.credentials)
    release(former, RECOVERING)
    return latest


async def _attempt_or_lose(
    resolved: Resolved, run: RunFolder, driver: Driver, view: View, recoveries: Recoveries
) -> int | None:
    """As `_attempt`; None when something was lost and the next attempt may begin.

    Raises:
        RunError: something was lost in vain too often, or somebody else has the run by now.
    """
    attempt = run.last_attempt
    try:
        return await _attempt(resolved, run, driver, view)
    except LostError as error:
        if driver.signals:  # the last commit stands
            view.log(f"{error.message}; the run was about to stop")
            return ASKED_TO_STOP
        if run.last_attempt != attempt:
            raise
        recoveries.note(error, max((path.name for path in run.checkpoints()), default=""))
        # Servers outlive an attempt, unless their memory may be away when it ends.
        await driver.end_attempt(keeps=lambda group: group.role == "server" and not resolved.config.takes_turns)
        return None


async def _attempt(resolved: Resolved, run: RunFolder, driver: Driver, view: View) -> int:
    """Start the run's processes and watch them; 0, or `ASKED_TO_STOP`."""
    config = resolved.config
    if config.model.source is not None and not run.model_note.is_file():
        await driver.start([model_group(run.path)])
        code = await driver.watch("model_initialization", view.prepare, MODEL_STOP_S)
        if driver.signals:
            return code or ASKED_TO_STOP
        driver.forget("model_initialization")
        write_provenance(run, {one.name: one for one in [*saved_records(run), *model_records(run, {})]}.values())
    required, optional = split_optional(config, process_groups(config, run.path))
    await driver.start(required, optional)
    code = await driver.watch("trainer", lambda: view.update(driver.describe))
    await driver.end_others(code)
    return code
