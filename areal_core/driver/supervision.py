"""Process groups of a program that trains nothing, such as `areal eval`: started, watched and ended as in a run."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from areal_core.driver.groups import model_group
from areal_core.runtime.attempts import claim, next_attempt, release
from areal_core.runtime.progress import preparation
from areal_core.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from areal_core.config import Resolved
    from areal_core.interfaces.launcher import Launcher, ProcessGroup
    from areal_core.runtime.folder import RunFolder


async def supervise(
    resolved: Resolved,
    run: RunFolder,
    groups: Sequence[ProcessGroup],
    role: str,
    *,
    on_message: Callable[[Any], None],
    update: Callable[[str], None],
    log: Callable[[str], None],
    signals: list[int],
    prepares_model: bool = True,
) -> None:
    """Start process groups, and return when the first process of a role has ended. All processes are gone then.

    `examples/programs/generate.py` is a program that uses it.

    Args:
        resolved: the config, with the launcher.
        run: the run folder, with the config. A former program that used it must have ended.
        groups: what is started; see `rollout_groups` for the groups that generate.
        role: the role that is waited for.
        on_message: called with each message that a process sends to the driver by `Member.notify`.
        update: called a few times a second, with the progress of the model's preparation; empty after it.
        log: shows a line to the user.
        signals: gets the numbers of signals that ask this program to stop. After the first one the processes of the
            role are asked to stop, and no others are started.
        prepares_model: whether the config's model source makes the model first.

    Raises:
        RunError: an essential process failed, there is no room, or a signal came while processes were started.
    """
    launcher = resolved.config.launcher.build()
    async with supervising(launcher, run, on_message, log, signals) as supervisor:
        if prepares_model and resolved.config.model.source is not None:
            await supervisor.start([model_group(run.path)])
            await supervisor.watch("model_initialization", lambda: update(preparation(run)))
            supervisor.mark_done("model_initialization")
        if not signals:
            await supervisor.start(groups)
            await supervisor.watch(role, lambda: update(""))


@asynccontextmanager
async def supervising(
    launcher: Launcher,
    run: RunFolder,
    on_message: Callable[[Any], None],
    log: Callable[[str], None],
    signals: list[int] | None = None,
) -> AsyncIterator[Supervisor]:
    """Claim a run folder inside the block, and end all processes after it; see `Supervisor` for the arguments.

    Raises:
        UsageError: another program drives the run.
    """
    attempt = next_attempt(run, log)
    supervisor = Supervisor(launcher, run, on_message, log, signals)
    is_claimed = False
    try:
        address = await supervisor.listen()
        supervisor.admit(attempt)
        claim(attempt, address, supervisor.credentials)
        is_claimed = True
        yield supervisor
    finally:
        await supervisor.close()
        if is_claimed:
            release(attempt)
