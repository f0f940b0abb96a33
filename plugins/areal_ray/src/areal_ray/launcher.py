"""The launcher: a program of its own speaks with Ray (`driver.py`), so that the supervisor has none of it in it.

Ray's threads, its handler of SIGTERM and its memory stay out of the process that keeps a run alive; what Ray counts as
the driver ends for sure when that program does, and a run that goes back to its last checkpoint begins with a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.background import start_thread
from areal_core.cli.output import complain
from areal_core.errors import RunError
from areal_core.interfaces.launcher import describe_exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_ray.config import RaySettings

CONNECT_S = 300.0
"""For Ray to answer; a cluster of this machine alone is started in it, which takes 40 s on a busy one."""
MARGIN_S = 60.0
"""Beyond the time for placing: for the driver to say how it went."""
END_S = 60.0
"""For the nodes to end; a driver that takes longer is killed, and Ray ends its actors."""
LAST_WORDS = 2000


class RayLauncher:
    """Brings wardens to nodes of a Ray cluster."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._driver: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the driver writes
        self._told: dict[str, Any] = {}
        self._lost: dict[str, str] = {}
        self._changed = threading.Condition()

    @property
    def host(self) -> str:
        """This machine's address in the cluster; asks Ray at the first time.

        Raises:
            RunError: Ray cannot be reached.
        """
        if self._driver is None:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "areal_ray.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
            start_thread(self._hear, "what Ray's driver says")
            self._order(self._settings.model_dump(mode="json"))
        return str(self._answer("host", CONNECT_S, "the Ray cluster to answer"))

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`."""
        assert self.host
        self._order({"command": list(command), "environment": dict(environment)})
        limit = self._settings.placement_timeout_s + MARGIN_S
        return len(self._answer("nodes", limit, "room in the Ray cluster"))

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        with self._changed:
            return dict(self._lost)

    def close(self) -> None:
        """See `Launcher.close`."""
        if self._driver is None:
            return
        assert self._driver.stdin is not None
        with suppress(OSError):  # it has ended before it read its last order
            self._driver.stdin.close()
        try:
            self._driver.wait(END_S)
        except subprocess.TimeoutExpired:
            complain(f"Ray's driver has not ended the nodes within {END_S:g} s, and is killed")
            self._driver.kill()
        if self._driver.wait() and "nodes" in self._told:
            complain("Ray's driver was killed: the end of its nodes is not confirmed; they end by themselves")

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self._driver is not None
        assert self._driver.stdin is not None
        with suppress(OSError):  # it has ended; whoever waits for its answer is told
            self._driver.stdin.write(f"{json.dumps(order)}\n")
            self._driver.stdin.flush()

    def _answer(self, key: str, limit_s: float, what: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._told.keys() & {key, "failed", "code"}, limit_s)
            told = dict(self._told)
        if key in told and not told.keys() & {"failed", "code"}:
            return told[key]
        if "failed" in told:
            raise RunError(told["failed"], hints=told["hints"])
        if "code" in told:
            raise RunError(f"the program that speaks with Ray {describe_exit(told['code'])}; it said:\n{self._words()}")
        raise RunError(f"waited {limit_s:g} s for {what}, in vain; Ray's driver said:\n{self._words()}")

    def _words(self) -> str:
        """What the driver, and Ray in it, wrote last."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace").strip()

    def _hear(self) -> None:
        """Take what the driver says, until it has ended."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            told = json.loads(line)
            for text in told.pop("said", []):
                complain(text)
            with self._changed:
                self._lost |= told.pop("lost", {})
                self._told |= told
                self._changed.notify_all()
        code = self._driver.wait()
        with self._changed:
            for name in self._told.get("nodes", ()):
                self._lost.setdefault(name, f"the program that speaks with Ray {describe_exit(code)}")
            self._told["code"] = code
            self._changed.notify_all()
