"""Groups of the kernel that limit memory and processes of a whole command, where this machine lets them be made."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from areal_core.errors import RunError

MOUNTS: Final = Path("/proc/self/mounts")
OWN: Final = Path("/proc/self/cgroup")
REMOVAL_S, REMOVAL_PAUSE_S = 5.0, 0.001
"""For the kernel to forget the dead."""


@dataclass(frozen=True)
class Cgroups:
    """Folders in which groups can be made: of version 2 one, of version 1 one for memory and one for processes."""

    memory: Path
    processes: Path

    @property
    def is_version_2(self) -> bool:
        """Whether both are limited by one group."""
        return self.memory == self.processes

    @classmethod
    def find(cls) -> Cgroups | None:
        """Beside or within the group of this process; None where no group can be made there."""
        for found in (_version_2(), _version_1()):
            if found is None:
                continue
            try:
                group = found.make(1 << 30, 64)
            except OSError:
                continue
            group.remove()
            found.forget_others()
            return found
        return None

    def make(self, memory_bytes: int, processes: int) -> Group:
        """A group with these limits.

        Raises:
            OSError: this process may not.
        """
        name = f"areal-{os.getpid()}-{secrets.token_hex(4)}"
        group = Group(self.memory / name, self.processes / name)
        try:
            for folder in group.folders:
                folder.mkdir()
            if self.is_version_2:
                (group.memory / "memory.max").write_text(str(memory_bytes))
                swap = group.memory / "memory.swap.max", 0
            else:
                (group.memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
                swap = group.memory / "memory.memsw.limit_in_bytes", memory_bytes
            if swap[0].exists():  # else this kernel does not count it
                swap[0].write_text(str(swap[1]))
            (group.processes / "pids.max").write_text(str(processes))
        except OSError:
            group.remove()
            raise
        return group

    def forget_others(self) -> None:
        """Remove what processes have left that were killed."""
        for folder in {self.memory, self.processes}:
            for left in folder.glob("areal-*-*"):
                if not Path("/proc", left.name.split("-")[1]).exists():
                    with suppress(OSError):
                        left.rmdir()


@dataclass(frozen=True)
class Group:
    """A group of one command."""

    memory: Path
    processes: Path

    @property
    def folders(self) -> set[Path]:
        """All that it has."""
        return {self.memory, self.processes}

    @property
    def words(self) -> list[str]:
        """In front of a command that is to begin in it."""
        enter = " && ".join(f"echo 0 > {shlex.quote(str(folder / 'cgroup.procs'))}" for folder in sorted(self.folders))
        return ["/bin/sh", "-c", f'{enter} && exec "$@"', "sh"]

    def has_run_out(self) -> bool:
        """Whether the kernel has ended a process because memory was used up."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                lines = dict(line.split() for line in (self.memory / name).read_text().splitlines())
                return int(lines.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Once its processes have ended.

        Raises:
            RunError: it still has some.
        """
        deadline = time.monotonic() + REMOVAL_S
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise RunError(f"the cgroup {folder} of a sandbox cannot be removed: {error}") from error
                    time.sleep(REMOVAL_PAUSE_S)


def _memberships() -> dict[str, str]:
    """The path of this process's group by controller; of version 2 by the empty word."""
    found = {}
    for line in OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounted(kind: str, controller: str = "") -> Path | None:
    for line in MOUNTS.read_text().splitlines():
        _, place, found, options, *_ = line.split()
        if found == kind and (not controller or controller in options.split(",")):
            return Path(place)
    return None


def _version_2() -> Cgroups | None:
    mount = _mounted("cgroup2")
    if mount is None:
        return None
    own = mount / _memberships().get("", "/").lstrip("/")
    for folder in (own, own.parent):
        with suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                return Cgroups(folder, folder)
    return None


def _version_1() -> Cgroups | None:
    folders = []
    for controller in ("memory", "pids"):
        mount = _mounted("cgroup", controller)
        if mount is None:
            return None
        own = mount / _memberships().get(controller, "/").lstrip("/")
        folders.append(own if own.is_dir() else mount)  # a container may see its own group as the root
    return Cgroups(*folders)
