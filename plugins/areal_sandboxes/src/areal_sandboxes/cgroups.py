"""Control groups that limit the memory and the processes of a whole command, if this machine allows them."""

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
REMOVAL_TIMEOUT_S: Final = 5.0
"""Seconds that the kernel may take to forget the processes of a group that have exited."""
REMOVAL_PAUSE_S: Final = 0.001
"""Seconds between two tries to remove a group."""


@dataclass(frozen=True)
class Cgroups:
    """Folders in which groups can be made: the same one twice with cgroup version 2, two different ones with version 1.

    Attributes:
        memory: folder of groups that limit memory.
        processes: folder of groups that limit the number of processes.
    """

    memory: Path
    processes: Path

    @property
    def is_version_2(self) -> bool:
        """True if one group limits both."""
        return self.memory == self.processes

    @classmethod
    def find(cls) -> Cgroups | None:
        """Find folders next to or within this process's group in which groups can be made; None if there are none."""
        for cgroups in (_version_2(), _version_1()):
            if cgroups is None:
                continue
            try:
                group = cgroups.make(1 << 30, 64)
            except OSError:
                continue
            group.remove()
            cgroups.remove_leftovers()
            return cgroups
        return None

    def make(self, memory_bytes: int, processes: int) -> Group:
        """Make a group.

        Args:
            memory_bytes: limit on memory and swap of all processes together, in bytes.
            processes: maximum number of processes and threads.

        Raises:
            OSError: the group cannot be made.
        """
        name = f"areal-{os.getpid()}-{secrets.token_hex(4)}"
        group = Group(self.memory / name, self.processes / name)
        try:
            for folder in group.folders:
                folder.mkdir()
            if self.is_version_2:
                (group.memory / "memory.max").write_text(str(memory_bytes))
                swap_file, swap_limit = group.memory / "memory.swap.max", 0
            else:
                (group.memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
                swap_file, swap_limit = group.memory / "memory.memsw.limit_in_bytes", memory_bytes
            if swap_file.exists():  # missing if this kernel does not count swap
                swap_file.write_text(str(swap_limit))
            (group.processes / "pids.max").write_text(str(processes))
        except OSError:
            group.remove()
            raise
        return group

    def remove_leftovers(self) -> None:
        """Remove groups of areal processes that were killed before they could remove them."""
        for folder in {self.memory, self.processes}:
            for group in folder.glob("areal-*-*"):
                if not Path("/proc", group.name.split("-")[1]).exists():
                    with suppress(OSError):
                        group.rmdir()


@dataclass(frozen=True)
class Group:
    """Group of one command.

    Attributes:
        memory: folder of the group that limits memory.
        processes: folder of the group that limits the number of processes.
    """

    memory: Path
    processes: Path

    @property
    def folders(self) -> set[Path]:
        """Folders of the group."""
        return {self.memory, self.processes}

    @property
    def prefix(self) -> list[str]:
        """Words in front of a command, which make it start in the group."""
        enter = " && ".join(f"echo 0 > {shlex.quote(str(folder / 'cgroup.procs'))}" for folder in sorted(self.folders))
        return ["/bin/sh", "-c", f'{enter} && exec "$@"', "sh"]

    def has_run_out(self) -> bool:
        """Return whether the kernel has killed a process of the group for lack of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(FileNotFoundError):
                lines = dict(line.split() for line in (self.memory / name).read_text().splitlines())
                return int(lines.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Remove the group, after its processes have exited.

        Raises:
            RunError: some have not exited within `REMOVAL_TIMEOUT_S`.
        """
        deadline = time.monotonic() + REMOVAL_TIMEOUT_S
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise RunError(f"the cgroup {folder} of a sandbox cannot be removed: {error}") from error
                    time.sleep(REMOVAL_PAUSE_S)


def _memberships() -> dict[str, str]:
    """Return the path of this process's group by controller; version 2 has the empty controller name."""
    paths = {}
    for line in OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounted(kind: str, controller: str = "") -> Path | None:
    for line in MOUNTS.read_text().splitlines():
        _, mount, filesystem, options, *_ = line.split()
        if filesystem == kind and (not controller or controller in options.split(",")):
            return Path(mount)
    return None


def _version_2() -> Cgroups | None:
    mount = _mounted("cgroup2")
    if mount is None:
        return None
    group = mount / _memberships().get("", "/").lstrip("/")
    for folder in (group, group.parent):
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
        group = mount / _memberships().get(controller, "/").lstrip("/")
        folders.append(group if group.is_dir() else mount)  # in a container its own group may be mounted as the root
    return Cgroups(*folders)
