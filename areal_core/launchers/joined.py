"""Nodes that somebody else's scheduler brings: each runs `areal join RUN_DIR`, and is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.node import own_address
from areal_core.launchers.settings import LocalSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.launchers.settings import JoinedSettings


class JoinedLauncher:
    """A `Launcher` that brings nobody, or only a warden for this machine.

    Nodes that have joined cannot be ended from here: they confirm their end to the supervisor (`Wardens.close`).

    Attributes:
        joining_s: seconds that nodes have to join.
    """

    def __init__(self, settings: JoinedSettings) -> None:
        self.host = settings.host or own_address()
        self.joining_s = settings.joining_timeout_s
        self._count = settings.nodes
        self._own = LocalLauncher(LocalSettings.model_validate({})) if settings.here else None

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`; others find the same in the run's folder."""
        if self._own is not None:
            self._own.bring(command, environment)
        return self._count

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        return {} if self._own is None else self._own.lost()

    def close(self) -> None:
        """See `Launcher.close`."""
        if self._own is not None:
            self._own.close()
