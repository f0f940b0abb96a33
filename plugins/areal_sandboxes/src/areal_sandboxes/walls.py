"""Command lines of bubblewrap: what a command can see, and its limits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.errors import ConfigError
from areal_sandboxes.config import MEBIBYTE
from areal_sandboxes.programs import find_program

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from areal_sandboxes.config import BubblewrapSettings

NOBODY: Final = "65534"
FOLDER: Final = "/tmp/work"
"""Working directory of commands."""
SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
LINKED: Final = ("/etc/alternatives", "/etc/ld.so.cache")
"""Files of /etc that Debian's programs need to find one another and their libraries. The rest of /etc is hidden."""
TAKEN: Final = frozenset((*SYSTEM, "/dev", "/etc", "/proc", "/sys", "/tmp", "/usr", "/var"))
"""Names that no folder of a command may have."""
NO_FOLDERS: Final[Mapping[str, Path]] = {}
SHARED_MEMORY: Final = 16 * MEBIBYTE
"""Size of /dev/shm in bytes."""
OPEN_FILES: Final = 256


def is_root() -> bool:
    """Return whether this process is root of the machine, and not of a user namespace, where processes are counted."""
    first = Path("/proc/self/uid_map").read_text().split(maxsplit=2)[:2]
    return os.geteuid() == 0 and first == ["0", "0"]


def outer_command(settings: BubblewrapSettings, folders: Mapping[str, Path] = NO_FOLDERS) -> list[str]:
    """Return the command line of an outer bubblewrap, which gives up root; empty if areal does not run as root.

    The kernel counts processes by user and does not count root's at all, not even in a namespace that root has made. So
    the outer bubblewrap binds what only root may open and continues as nobody. It has its own process namespace:
    only then do nobody's processes die with root's.
    """
    if not is_root():
        return []
    return [
        *(find_program("bwrap"), "--die-with-parent", "--unshare-pid", *view(settings)),
        *("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--dir", "/tmp"),
        *(word for name, path in folders.items() for word in ("--bind", str(path), name)),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP", "--"),
        *(find_program("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--"),
    ]


def inner_command(settings: BubblewrapSettings, folders: Mapping[str, Path] = NO_FOLDERS) -> list[str]:
    """Return the command line of the sandbox. More options may follow, then `--` and `limits`.

    Args:
        settings: limits, and paths that commands may read.
        folders: folders that commands may change, by their paths in the sandbox.
    """
    # The outer bubblewrap has bound them where they belong.
    changed = {name: Path(name) if is_root() else path for name, path in folders.items()}
    return [
        *(find_program("bwrap"), "--die-with-parent", "--new-session"),
        # Name each namespace: `--unshare-all` skips those that fail.
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
        *("--disable-userns", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
        *(["--ro-bind", "/", "/"] if is_root() else view(settings)),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY), "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--size", str(settings.disk_mib * MEBIBYTE), "--perms", "1777", "--tmpfs", "/tmp", "--dir", FOLDER),
        *_bind(path for path in readable_paths(settings) if path.is_relative_to("/tmp")),
        *(word for name, path in changed.items() for word in ("--bind", str(path), name)),
        # Both are in memory without a size limit, so make them read-only.
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER),
        *(word for name, value in _variables(settings).items() for word in ("--setenv", name, value)),
    ]


def checked_folders(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders that a command may change, after giving them to the user of the sandbox.

    Raises:
        ValueError: a path in the sandbox is not `/NAME`, or is one of the system's; or there is no such folder.
    """
    for name, path in folders.items():
        if not re.fullmatch(r"/[a-z][a-z0-9_-]*", name) or name in TAKEN:
            raise ValueError(f"a folder in a sandbox must be called /NAME and not like one of the system: {name!r:.80}")
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}")
        if is_root() and path.stat().st_uid != int(NOBODY):
            for each in (path, *path.rglob("*")):
                os.chown(each, int(NOBODY), int(NOBODY), follow_symlinks=False)
    return {name: path.resolve() for name, path in folders.items()}


def limits(settings: BubblewrapSettings) -> list[str]:
    """Return the command line that sets the limits of processes. It runs inside, because limits count per namespace."""
    values = {
        "as": settings.memory_mib * MEBIBYTE,
        "cpu": f"{settings.cpu_s}:{settings.cpu_s + 1}",
        "nproc": settings.processes,
        "fsize": settings.file_mib * MEBIBYTE,
        "nofile": OPEN_FILES,
        "core": 0,
    }
    return [find_program("prlimit"), *(f"--{name}={value}" for name, value in values.items()), "--"]


def view(settings: BubblewrapSettings) -> list[str]:
    """Return the options that bind the machine's files which commands may read."""
    options = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            options += ["--ro-bind", name, name]
    return [*options, *_bind(readable_paths(settings))]


def readable_paths(settings: BubblewrapSettings) -> list[Path]:
    """Return the folders and files that commands may read, including the targets of links.

    Raises:
        ConfigError: a path in the settings does not exist.
    """
    if missing := [str(path) for path in settings.paths if not path.exists()]:
        raise ConfigError(f"paths of the sandbox bubblewrap do not exist: {', '.join(missing)}")
    visible = [Path("/usr"), *map(Path, LINKED), *_prefixes(_python(settings)), *settings.paths]
    existing = {candidate for path in visible if path.exists() for candidate in (path, path.resolve())}
    return sorted(path for path in existing if not existing.intersection(path.parents))


def _bind(paths: Iterable[Path]) -> list[str]:
    options = []
    for path in paths:
        # bubblewrap would create missing parents with permissions for their owner only.
        for parent in reversed(path.parents[:-1]):
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", str(path), str(path)]
    return options


def _variables(settings: BubblewrapSettings) -> dict[str, str]:
    search = [str(_python(settings).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    # With one thread for each core, numerical libraries would exceed the limit of processes on large machines.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    base = {"PATH": ":".join(dict.fromkeys(search)), "HOME": FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    return base | threads | settings.variables


def _python(settings: BubblewrapSettings) -> Path:
    return settings.python or Path(sys.executable)


@cache
def _prefixes(python: Path) -> Sequence[Path]:
    """Return the folders of an interpreter and its libraries."""
    if python == Path(sys.executable):
        return Path(sys.prefix), Path(sys.base_prefix)
    command = [str(python), "-I", "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"python of the sandbox bubblewrap is {python}, which cannot be run: {error}",
            hints=("name a Python interpreter of this machine, such as /usr/bin/python3",),
        ) from error
    return [Path(line) for line in answer.splitlines()]
