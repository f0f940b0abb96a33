"""The parent of a run: its folder, its processes, what the terminal shows, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import ArealError, RunError, UsageError
from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.runs.plan import make_plan
from areal_core.plugins import compare
from areal_core.launchers.processes import exit_description, last_lines
from areal_core.runs.summary import summarise_run
from areal_core.runs.view import open_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_core.config import Resolved
    from areal_core.interfaces.launcher import Launcher

INTERRUPTED_EXIT_CODE = 75
"""Of a trainer that was asked to stop and has committed a checkpoint."""
GRACE_S = 20.0
POLL_S = 0.25


def execute(
    resolved: Resolved, *, run_dir: Path | None, resume: Path | None, dry_run: bool, allow_changed_plugins: bool
) -> int:
    """Check, start, watch and end a run.

    Args:
        resolved: its config.
        run_dir: of a new run.
        resume: of a run to go on with; exactly one of the two is given.
        dry_run: print the plan and start nothing.
        allow_changed_plugins: resume although plugins have changed.

    Returns:
        The exit code: 0 done, 130 or 143 interrupted after a checkpoint.

    Raises:
        ArealError: the request was wrong (exit code 2, nothing left on disk) or the run failed (1).
    """
    folder = (resume or run_dir or Path()).resolve()
    plan = make_plan(resolved)
    if dry_run:
        sys.stdout.write(f"{plan}\n")
        return 0
    resolved.plugins.events.configure(resolved.config)
    if resume is not None:
        _check_plugins(resolved, folder, allowed=allow_changed_plugins)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_run_in(folder):
        sys.stdout.write(f"run folder: {folder}\n")
        sys.stdout.flush()
        (folder / "config.yaml").write_text(resolved.to_yaml())
        saved = [record.as_dict() for record in resolved.provenance()]
        (folder / "plugins.json").write_text(json.dumps(saved, indent=1))
        (folder / "error.json").unlink(missing_ok=True)
        resolved.plugins.events.run_started(resolved.config, folder)
        outcome, began = "failed", time.monotonic()
        try:
            code = _supervise(resolved, folder)
            outcome = "interrupted" if code else "done"
        finally:
            resolved.plugins.events.run_finished(folder, outcome)
        if not code:
            summary = summarise_run(folder, resolved.config.steps, time.monotonic() - began)
            sys.stdout.write(f"{summary}\n")
        return code


def write_error(run_dir: Path, error: ArealError) -> None:
    """Note why a process of the run gives up; the first to do so is what the parent reports."""
    path = run_dir / "error.json"
    if not path.exists():
        path.write_text(json.dumps({"message": error.message, "hints": error.hints}))


def _check_plugins(resolved: Resolved, folder: Path, *, allowed: bool) -> None:
    path = folder / "plugins.json"
    if not path.is_file():
        raise UsageError(f"{folder} was never started: it has no plugins.json", hints=["start it with: areal run"])
    changes = compare(json.loads(path.read_text()), [record.as_dict() for record in resolved.provenance()])
    if changes and not allowed:
        raise UsageError(
            f"plugins have changed since the run in {folder} was started: {'; '.join(changes)}",
            hints=["install the former versions, or add --allow-changed-plugins"],
        )


@contextmanager
def _only_run_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets go of it when this process ends, however it ends."""
    with (folder / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is running in {folder}", hints=["wait for it, or choose another run_dir=PATH"]
            ) from None
        yield


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A private folder for sockets and published weights, in memory where possible.

    Its name is kept in the run folder, so that a run that was killed leaves nothing behind once it is resumed.
    """
    note = folder / "scratch.txt"
    if note.is_file():
        shutil.rmtree(note.read_text(), ignore_errors=True)
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="areal-", dir=memory if memory.is_dir() else None))
    note.write_text(str(scratch))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        note.unlink(missing_ok=True)


def _supervise(resolved: Resolved, folder: Path) -> int:
    interruption = _Interruption()
    config = resolved.config
    with _scratch(folder) as scratch, open_view(resolved, folder) as view:
        if config.model.source is not None and not (folder / "model_folder.txt").is_file():
            preparing: Launcher = config.launcher.build()
            environment = {"AREAL_SCRATCH": str(scratch)}
            preparing.start([_process("prepare", "prepare", folder, environment)], folder)
            _watch(preparing, interruption, view.prepare, folder, main="prepare")
        if interruption.signal:
            return interruption.exit_code
        launcher: Launcher = config.launcher.build()
        launcher.start(_processes(resolved, folder, scratch, launcher.trainer_processes), folder)
        code = _watch(launcher, interruption, view.update, folder, main="trainer-0")
    if code == INTERRUPTED_EXIT_CODE:
        sys.stdout.write(f"stopped after a checkpoint; go on with: areal run --resume {folder}\n")
        return interruption.exit_code
    return 0


def _watch(launcher: Launcher, interruption: _Interruption, update: object, folder: Path, *, main: str) -> int:
    """Wait for the main process; any other that ends before it, or any that fails, ends the run.

    Returns:
        0 or INTERRUPTED_EXIT_CODE.

    Raises:
        RunError: a process failed; the message holds its reason or its last lines.
    """
    asked = 0
    try:
        while True:
            codes = launcher.poll()
            failed = {name: code for name, code in codes.items() if code not in (0, INTERRUPTED_EXIT_CODE)}
            if failed:
                raise _failure(failed, folder, launcher)
            if main in codes:
                launcher.stop(GRACE_S)
                return codes[main]
            if "controller" in codes:
                time.sleep(1.0)  # the trainer may be about to end as well
                if main not in launcher.poll():
                    raise RunError("the rollout controller ended before the trainer", hints=["see logs/controller.log"])
            if interruption.count > asked:
                asked = interruption.count
                if asked > 1:
                    raise RunError("stopped at once; the last committed checkpoint is kept", exit_code=130)
                launcher.interrupt()
            update()  # type: ignore[operator]
            time.sleep(POLL_S)
    finally:
        launcher.stop(0)


def _failure(failed: Mapping[str, int], folder: Path, launcher: Launcher) -> RunError:
    """What to tell of processes that failed: the reason that one of them noted, or the end of its log."""
    path = folder / "error.json"
    deadline = time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline and len(launcher.poll()) == len(failed):
        time.sleep(0.1)
    hint = f"go on with: areal run --resume {folder}"
    if path.exists():
        noted = json.loads(path.read_text())
        return RunError(noted["message"], hints=[*noted["hints"], hint])
    name, code = next(iter(failed.items()))
    log = folder / "logs" / f"{name}.log"
    return RunError(f"{name} ended with {exit_description(code)}; the end of its log:\n{last_lines(log)}", hints=[hint])


def _processes(resolved: Resolved, folder: Path, scratch: Path, ranks: int) -> list[ProcessSpecification]:
    """The controller, where something is generated, and the trainer's ranks with torchrun's variables."""
    shared = {"AREAL_SCRATCH": str(scratch), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = []
    if resolved.config.inference_engine is not None:
        processes.append(_process("controller", "controller", folder, shared))
    gpus = resolved.config.placement.training
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    for rank in range(ranks):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), **visible}
        processes.append(_process(f"trainer-{rank}", "trainer", folder, shared | variables))
    return processes


def _process(name: str, role: str, folder: Path, environment: Mapping[str, str]) -> ProcessSpecification:
    arguments = ["-m", "areal_core.runs.roles", role, str(folder), str(os.getpid())]
    return ProcessSpecification(name, arguments, environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Interruption:
    """Counts SIGINT and SIGTERM: the first asks for a checkpoint, the second ends the run at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._see)

    def _see(self, number: int, frame: object) -> None:
        self.signal = number
        self.count += 1

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)
