"""How servers that others start join a run and leave it: a file for each in the run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Registry:
    """The folder `servers/` of a run: `NAME.json` announces a server, its removal asks that it be drained.

    What the fleet makes of each is in `status/servers.json`.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "servers"
        self._status = run_dir / "status" / "servers.json"
        self._known: set[str] = set()
        self._reported: Mapping[str, str] = {}

    def announce(self, name: str, address: str) -> None:
        """A server asks to join."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}"
        temporary.write_text(json.dumps({"address": address}))
        temporary.rename(self._folder / f"{name}.json")

    def withdraw(self, name: str) -> None:
        """A server asks to leave."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)

    def announced(self) -> dict[str, str]:
        """Addresses of the servers that want to be in the run, by name."""
        found = {}
        for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
            with suppress(OSError, ValueError, KeyError):
                found[path.stem] = str(json.loads(path.read_text())["address"])
        self._known |= found.keys()
        return found

    def knew(self, name: str) -> bool:
        """Whether a server of this name was announced since this process began."""
        return name in self._known

    def report(self, states: Mapping[str, str]) -> None:
        """Write down where each server is in its life, where that has changed."""
        if states == self._reported:
            return
        self._reported = dict(states)
        self._status.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._status.with_suffix(".new")
        temporary.write_text(json.dumps(self._reported))
        temporary.rename(self._status)

    def states(self) -> dict[str, str]:
        """What the fleet last wrote down."""
        with suppress(OSError, ValueError):
            states: dict[str, str] = json.loads(self._status.read_text())
            return states
        return {}
