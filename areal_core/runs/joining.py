"""This process as a node of a run that somebody else's scheduler spreads: from before the run is there to its end."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.launchers import warden
from areal_core.launchers.arrivals import no_word
from areal_core.launchers.shared_folder import STALE_S
from areal_core.launchers.wardens import LEASE_S, MARGIN_S
from areal_core.messages import Credentials
from areal_core.messages.processes import Owner, WhoOwns
from areal_core.runs.ownership import ask_owner, exit_code_of, read_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.runs.folder import EpochFolder, RunFolder

ANSWER_S = 5.0
POLL_S = 0.5
ASK_EVERY_S = 10.0
PROGRESS_S = 10.0
TRIES, TRIES_S = 3, 600.0
"""Times that a run may let go of this node within one epoch and so many seconds: it does not want it."""
SETTLED_S = 120.0
"""After which a run that is done, and that another rank was to go on with, stays as it is."""
GONE_S = LEASE_S + 2 * MARGIN_S + STALE_S
"""For an owner to let go of all nodes, which may take a lease and its margin, and for its last word to be seen here."""


class Joining:
    """A node that joins a run, epoch after epoch.

    Args:
        run: its folder, which need not be there yet.
        has_warden: whether this process is the one that runs the node's warden; others only wait for the end.
        patience_s: for the run to be there.
        say: shows a line to the user.
        is_started: whether another rank of the same scheduler starts the run, or goes on with it, about now: that it
            was done before says nothing for a while.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        has_warden: bool,
        patience_s: float,
        say: Callable[[str], None],
        is_started: bool = False,
    ) -> None:
        self._is_started = is_started
        self._run = run
        self._has_warden = has_warden
        self._patience_s = patience_s
        self._say = say
        self._stood: list[tuple[int, float]] = []
        """The epochs in which it was a node, and since when."""
        self._was_let_go = False

    def serve(self) -> int:
        """Until the run has ended; its exit code.

        Raises:
            RunError: the run is not there in time, is gone without a word, or does not take this node.
        """
        began = told = time.monotonic()
        ending = None
        while True:
            epoch, owner = self._run.last_epoch, None
            code = exit_code_of(epoch) if epoch is not None else None
            # A run that failed or was stopped before this node came may be about to go on: another one starts it.
            is_settled = not self._is_started or time.monotonic() - began > SETTLED_S
            if code is not None and (self._stood or (not code and is_settled)):
                self._say(f"the run in {self._run.path} has ended with exit code {code}")
                return code
            is_due = time.monotonic() - told > PROGRESS_S
            if epoch is not None and code is None and (is_due or epoch != ending):
                owner = self._owner(epoch)
            if owner is not None and owner.is_ending:
                ending = epoch
            elif epoch is not None and owner is not None:
                self._stand(epoch)
                if self._was_let_go:
                    self._say(f"the run in {self._run.path} goes on without this node, which is to be taken away")
                    return 0
                began = told = time.monotonic()
                continue
            now, limit_s = time.monotonic(), GONE_S if self._stood else self._patience_s
            if now - began > limit_s:
                raise self._given_up(limit_s)
            if is_due:
                told = now
                self._say(
                    f"waiting since {now - began:.0f} s, of {limit_s:g} s at most: {self._waits_for(epoch, owner)}"
                )
            time.sleep(POLL_S)

    @property
    def _here(self) -> str:
        return str(self._run.path)

    def _waits_for(self, epoch: EpochFolder | None, owner: Owner | None = None) -> str:
        if owner is not None:
            told = f": {no_word(owner.awaited)}" if owner.awaited else ""
            return f"the run in {self._here} is ending{told}"
        if self._is_started:
            return f"rank 0 is to start the run in {self._here}, or to go on with it"
        if epoch is None:
            start = f"areal run ... launcher.type=joined launcher.nodes=N run_dir={self._here}"
            return f"no run is in {self._here} yet; start it with: {start}"
        return f"the run in {self._here} has no owner that answers; go on with it: areal run --resume {self._here}"

    def _given_up(self, limit_s: float) -> RunError:
        if self._stood:
            return RunError(
                f"the owner of the run in {self._here} is gone, and no other has come within {limit_s:g} s",
                hints=[f"go on with it: areal run --resume {self._here}", f"then, here: areal join {self._here}"],
            )
        epoch = self._run.last_epoch
        return RunError(f"no run to join within {limit_s:g} s: {self._waits_for(epoch)}", hints=_reach(epoch))

    def _owner(self, epoch: EpochFolder) -> Owner | None:
        answer = ask_owner(epoch, WhoOwns(), ANSWER_S)
        return answer if isinstance(answer, Owner) else None

    def _stand(self, epoch: EpochFolder) -> None:
        """Be a node, or wait beside one, until the owner of the epoch lets go of it or is gone."""
        now = time.monotonic()
        if sum(number == epoch.number and now - since < TRIES_S for number, since in self._stood) == TRIES:
            raise RunError(
                f"the run in {self._here} has let go of this node {TRIES} times: it does not take it",
                hints=["what areal run has written says why: a folder that is not the same here, most of all"],
            )
        self._stood.append((epoch.number, now))
        self._say(f"joined the run in {self._here}, epoch {epoch.number}")
        if self._has_warden:
            self._run_warden(epoch)
            return
        asked = time.monotonic()
        while not epoch.released.exists() and self._run.last_epoch == epoch:
            if time.monotonic() - asked > ASK_EVERY_S:
                owner = self._owner(epoch)
                if owner is None or owner.is_ending:
                    return
                asked = time.monotonic()
            time.sleep(POLL_S)

    def _run_warden(self, epoch: EpochFolder) -> None:
        owner, token = read_owner(epoch)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        shown = Credentials(token, epoch.number)
        try:
            code = asyncio.run(warden.main(owner.address, LEASE_S, joining=shown))
        except OSError as error:
            code = 0
            self._say(f"no way to the owner of the run at {owner.address}: {error}")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._was_let_go = code == warden.LET_GO_EXIT_CODE
        if code == warden.ALONE_EXIT_CODE:
            self._say(f"the owner of the run is gone, or silent for {LEASE_S:g} s: everything here was ended")


def _reach(epoch: EpochFolder | None) -> list[str]:
    """What to look at where the owner of an epoch does not answer."""
    if epoch is None:
        return []
    owner, _ = read_owner(epoch)
    at = f"its owner was on {owner.host}, at {owner.address}"
    return [f"{at}: where this machine does not reach that, name another one: launcher.host=ADDRESS"]
