"""Why processes of a run have ended: where several fail together, which of them is the cause."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from areal_core.errors import ArealError, LostError, RunError
from areal_core.launchers.member import ASKED_TO_STOP, DRIVER_GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.driver.hub import Process
    from areal_core.messages.hub import Failing

CAUSE_S = 5.0
"""Within which the processes that end with the first one have said why."""
POLL_S = 0.05


async def find_cause(
    said: Sequence[tuple[Process, Failing]],
    essential: Callable[[], Sequence[Process]],
    log_path: Callable[[str], Path],
) -> ArealError:
    """Of those who fail together, whoever names a cause of its own counts, then who was killed.

    Args:
        said: last words so far; grows meanwhile.
        essential: the processes whose end is the end of the attempt.
        log_path: the file for the output of a process, by its name.
    """
    deadline = time.monotonic() + CAUSE_S
    while True:
        own = [(who, failing) for who, failing in said if who.is_essential and not failing.is_consequence]
        codes = {process: process.ended.result().code for process in essential() if process.ended.done()}
        failed = [who for who, code in codes.items() if code != ASKED_TO_STOP and not (code == 0 and who.has_finished)]
        is_over = time.monotonic() > deadline or all(process.ended.done() for process in essential())
        if refused := [process for process in failed if process.why]:
            return LostError(f"{refused[0].name}: {refused[0].why}", hints=[f"its log: {log_path(refused[0].name)}"])
        # What others meet in a library, when one is killed, looks like a cause of its own.
        if own and (is_over or not own[0][1].traceback):
            return _error_of(*own[0], log_path)
        speakers = {process for process, _ in said}
        if silent := [process for process in failed if process not in speakers]:
            process = silent[0]
            end = process.ended.result()
            kind = LostError if end.code is None or end.code < 0 or end.code == DRIVER_GONE else RunError
            message = f"{process.name} on {process.place.node} {end.describe()}"
            return kind(message, hints=[f"its log: {log_path(process.name)}"])
        if is_over:
            return _error_of(*next(one for one in said if one[0].is_essential), log_path)
        await asyncio.sleep(POLL_S)


def _error_of(process: Process, failing: Failing, log_path: Callable[[str], Path]) -> ArealError:
    if not failing.traceback:
        kind = LostError if failing.is_loss else RunError
        return kind(failing.text, hints=failing.hints, exit_code=failing.exit_code)
    message = f"{process.name} on {process.place.node} failed: {failing.text}\n{failing.traceback}"
    return RunError(message, hints=[f"its log: {log_path(process.name)}"])
