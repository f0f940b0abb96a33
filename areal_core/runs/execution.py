"""A run from request to end: checked, owned, started, watched, told."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.config.imports import KeptSources
from areal_core.disk import DiskError, replace_durably, writing
from areal_core.errors import LostError, RunError, UsageError
from areal_core.interfaces.launcher import Needs
from areal_core.launchers.warden import NODES_VARIABLE
from areal_core.messages import Credentials
from areal_core.messages.processes import Status, StepMetrics
from areal_core.plugins import compare
from areal_core.runs.balance import Split
from areal_core.runs.checking import CodeCheck
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import RECOVERING, claim, next_epoch, release
from areal_core.runs.plan import make_plan
from areal_core.runs.recoveries import Recoveries, way_on
from areal_core.runs.summary import summarise_run
from areal_core.runs.supervisor import INTERRUPTED_EXIT_CODE, Supervisor, role_process
from areal_core.runs.terminal import Terminal, say
from areal_core.runs.view import RunState, open_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.config import Resolved
    from areal_core.interfaces.launcher import Launcher, ProcessSpecification
    from areal_core.launchers.supervised import SupervisedProcess
    from areal_core.runs.folder import EpochFolder
    from areal_core.runs.view import View

SERVER = "server"
"""The role of processes that outlive an epoch, unless their memory may be away when it ends."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Where PyTorch's collectives look for the network that they use."""


def execute(
    resolved: Resolved,
    *,
    run_dir: Path | None,
    resume: Path | None,
    dry_run: bool,
    allow_changed_plugins: bool,
    as_json: bool = False,
    show: Callable[[str], None] = say,
) -> int:
    """Check, start, watch and end a run.

    Args:
        resolved: its config.
        run_dir: of a new run.
        resume: of a run to go on with; exactly one of the two is given.
        dry_run: print the plan and start nothing.
        allow_changed_plugins: resume although plugins have changed.
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
    epoch = next_epoch(run, say)
    done = run.last_step or 0
    if done > resolved.config.steps:
        more = f"for more: areal run --resume {run.word} steps={2 * done}"
        raise UsageError(f"the run has done {done} steps already, and steps is {resolved.config.steps}", hints=[more])
    steps, is_exported = resolved.config.steps, run.model.is_dir() or not resolved.config.checkpoint.export
    if run.last_epoch is not None and run.last_epoch.has_done(steps) and is_exported:
        say(f"the run is done, with all its {steps} steps; for more: areal run --resume {run.word} steps={2 * steps}")
        return 0
    with closing(CodeCheck(resolved)) as check:
        plan = make_plan(resolved, check.problems)
    if dry_run:
        show(plan.to_json() if as_json else str(plan))
        return 0
    resolved.plugins.events.configure(resolved.config)
    if resume is not None:
        _check_plugins(resolved, run, allowed=allow_changed_plugins)
    began = time.monotonic()
    with closing(Terminal()) as terminal:
        code = _run_through_losses(resolved, run, epoch, terminal)
    if not code:
        say(summarise_run(run, steps, time.monotonic() - began, Split.of(resolved.config), done))
    return code


def _run_through_losses(resolved: Resolved, run: RunFolder, epoch: EpochFolder, terminal: Terminal) -> int:
    """Bring the run to its end, with nodes that are brought again when some were lost; the exit code."""
    recoveries = Recoveries(resolved.config.launcher.keywords().get("recoveries_per_hour", 0), terminal.say)
    signals: list[int] = []
    while True:
        try:
            return asyncio.run(_own_and_supervise(resolved, run, epoch, terminal, recoveries, signals))
        except LostError:
            epoch = next_epoch(run, terminal.say)


def _check_plugins(resolved: Resolved, run: RunFolder, *, allowed: bool) -> None:
    if not run.plugins.is_file():
        raise UsageError(f"{run.path} was never started: it has no plugins.json", hints=["start it with: areal run"])
    changes = compare(json.loads(run.plugins.read_text()), [record.as_dict() for record in resolved.provenance()])
    if changes and not allowed:
        raise UsageError(
            f"plugins have changed since the run in {run.path} was started: {'; '.join(changes)}",
            hints=["install the former versions, or add --allow-changed-plugins"],
        )


async def _own_and_supervise(
    resolved: Resolved,
    run: RunFolder,
    epoch: EpochFolder,
    terminal: Terminal,
    recoveries: Recoveries,
    signals: list[int],
) -> int:
    """Make the run this process's own, and bring it to its end; the exit code.

    Args:
        resolved: its config.
        run: its folder.
        epoch: to claim.
        terminal: for the user.
        recoveries: counted, and limited.
        signals: that asked this program to stop; those of a former supervisor, that lost something, count as well.
    """
    say = terminal.say
    state = RunState(run, say, Split.of(resolved.config))
    launcher: Launcher = resolved.config.launcher.build()
    credentials = Credentials.create(epoch.number)
    supervisor = Supervisor(launcher, credentials, run.log, lambda *said: _hear(state, *said), say, signals)
    owned = _Owned(run, epoch, credentials)
    outcome, code, is_owner = "failed", 1, False
    try:
        owned.address = await supervisor.listen()
        _begin(resolved, run, epoch, owned.address, credentials)
        is_owner = True
        say(f"run folder: {run.path}")
        resolved.plugins.events.run_started(resolved.config, run.path)
        with open_view(resolved, state, terminal) as view:
            await supervisor.bring_nodes(run.path)
            while (ended := await _supervise_or_lose(resolved, owned, supervisor, state, view, recoveries)) is None:
                state.begin_again()
        outcome, code = ("interrupted", 128 + (supervisor.signals or [signal.SIGINT])[0]) if ended else ("done", 0)
    except RunError as error:
        code = error.exit_code
        if is_owner and run.last_epoch != owned.epoch:
            raise RunError(
                f"somebody else has taken over the run in {run.path} while this program was stopped or "
                "could not be reached; it has ended its own processes"
            ) from error
        if is_owner and not any("areal run --resume" in hint for hint in error.hints):  # it may know better
            error.hints = (*error.hints, way_on(run, has_failed=True))
        if isinstance(error, LostError):
            recoveries.note(error, _last_checkpoint(run))
            outcome = RECOVERING
        raise
    finally:
        await supervisor.close()
        if is_owner:
            release(owned.epoch, f"{outcome} {resolved.config.steps}{f' {code}' if code else ''}")
            if run.last_epoch == owned.epoch:
                told = "failed" if outcome == RECOVERING else outcome
                resolved.plugins.events.run_finished(run.path, told, next(iter(supervisor.signals), 0))
    if not code:
        return 0
    stopped = "stopped after a checkpoint" if any(run.checkpoints()) else "stopped before the first checkpoint"
    say(f"{stopped}; go on with: areal run --resume {run.word}")
    return code


def _begin(resolved: Resolved, run: RunFolder, epoch: EpochFolder, address: str, credentials: Credentials) -> None:
    """Make the run this process's own, and keep what it is made of.

    Raises:
        UsageError: somebody else was quicker.
        DiskError: the disk refuses; a new run leaves nothing, so that it can be started again.
    """
    is_new = not run.path.exists()
    claim(epoch, address, credentials)
    try:
        write_down(resolved, run)
    except DiskError as error:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
            error.hints = (error.hints[0], "nothing has begun: mend it, then start it again")
        raise


def write_down(resolved: Resolved, run: RunFolder) -> None:
    """Write what a run is made of into its folder, from which `areal run --resume` starts it, or goes on with it.

    Raises:
        DiskError: the disk refuses.
    """
    with writing("the run folder", run.path):
        run.sources.mkdir(parents=True, exist_ok=True)
        replace_durably(run.config, resolved.to_yaml().encode())
        for path in map(Path, resolved.files):
            replace_durably(KeptSources.place(run.sources, path), path.read_bytes())
        replace_durably(run.plugins, json.dumps([r.as_dict() for r in resolved.provenance()], indent=1).encode())


@dataclass
class _Owned:
    """A run that this program owns: in which epoch, with which credentials, and where its supervisor listens."""

    run: RunFolder
    epoch: EpochFolder
    credentials: Credentials
    address: str = ""


async def _supervise_or_lose(
    resolved: Resolved, owned: _Owned, supervisor: Supervisor, state: RunState, view: View, recoveries: Recoveries
) -> int | None:
    """As `_supervise`; None when something was lost and the next epoch may begin on the same nodes.

    Raises:
        LostError: something was lost, and the nodes must be brought anew.
    """
    try:
        return await _supervise(resolved, owned.run, supervisor, state, view)
    except LostError as error:
        if supervisor.signals:  # the last commit stands
            state.say(f"{error.message}; the run was about to stop")
            return INTERRUPTED_EXIT_CODE
        kept = "" if resolved.config.placement.in_turns else SERVER
        latest = owned.run.epoch(owned.epoch.number + 1)
        renewed = replace(owned.credentials, epoch=latest.number)
        if owned.run.last_epoch != owned.epoch or not await supervisor.begin_epoch(renewed, kept):
            raise
        recoveries.note(error, _last_checkpoint(owned.run))
        claim(latest, owned.address, renewed)
        release(owned.epoch, RECOVERING)
        owned.epoch, owned.credentials = latest, renewed
        return None


def _last_checkpoint(run: RunFolder) -> str:
    """The name of the newest one; empty where there is none."""
    return max((path.name for path in run.checkpoints()), default="")


async def _supervise(resolved: Resolved, run: RunFolder, supervisor: Supervisor, state: RunState, view: View) -> int:
    """Start the run's processes and watch them; 0, or `INTERRUPTED_EXIT_CODE`."""
    if resolved.config.model.source is not None and not run.model_note.is_file():
        preparer = supervisor.start(role_process("prepare", "preparer", run.path))
        code = await supervisor.watch(preparer, view.prepare)
        if supervisor.signals:
            return code or INTERRUPTED_EXIT_CODE
        supervisor.forget(preparer)
    try:
        processes = [supervisor.start(one) for one in specifications(resolved, run, supervisor)]
    except RunError as error:
        if not supervisor.give_up_nodes():
            raise
        raise LostError(f"a node has gone, and without it {error.message}", hints=error.hints) from error
    first_rank = next(process for process in processes if process.specification.role == "trainer")

    def update() -> None:
        if state.is_old:
            state.see(supervisor.owner)
        view.update()

    code = await supervisor.watch(first_rank, update)
    await supervisor.end_others()
    return code


def specifications(resolved: Resolved, run: RunFolder, supervisor: Supervisor) -> list[ProcessSpecification]:
    """The processes of a run: the controller, where something is generated, and the trainer's ranks.

    The controller stands beside rank 0, with which it speaks.

    Raises:
        RunError: a GPU is named that no node has.
    """
    config, ranks = resolved.config, resolved.config.trainer_processes
    gpus, launcher = config.placement.training, config.launcher.keywords()
    if gpus and (each := launcher.get("gpus_per_node")):
        supervisor.require_gpus(each, [*gpus, *(config.placement.generation or ())])
    nodes = supervisor.spread(ranks, gpus)
    processes = []
    if config.inference_engine is not None:
        controller = role_process("controller", "controller", run.path, needs=Needs(cores=1))
        processes.append(replace(controller, node=nodes[0].name))
    for rank, node in enumerate(nodes):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(nodes[:rank].count(node)), "WORLD_SIZE": str(ranks)}
        if supervisor.node_count > 1:
            name = launcher.get("network_interface") or node.ready.interface
            variables |= {NODES_VARIABLE: str(supervisor.node_count), **dict.fromkeys(INTERFACE_VARIABLES, name)}
        needs = Needs(launcher.get("threads_per_process", 1), supervisor.gpus_on(node, gpus))
        process = role_process(f"trainer-{rank}", "trainer", run.path, variables, needs)
        processes.append(replace(process, node=node.name))
    return processes


def _hear(state: RunState, process: SupervisedProcess, said: Any) -> None:
    """What processes say that is for whoever watches."""
    match said:
        case Status(fields):
            state.hear(process.specification.role, dict(fields))
        case StepMetrics(line):
            state.add(dict(line))
