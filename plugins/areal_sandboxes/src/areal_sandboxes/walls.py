"""The words of bubblewrap: what a command in it sees, and what it is kept from."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.errors import ConfigError
from areal_sandboxes.config import MEBIBYTE
from areal_sandboxes.programs import program

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_sandboxes.config import BubblewrapSettings

NOBODY: Final = "65534"
FOLDER: Final = "/tmp/work"
"""In which a command starts."""
SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
LINKED: Final = ("/etc/alternatives", "/etc/ld.so.cache")
"""Through which Debian's programs find one another and their libraries; nothing else of /etc is shown."""
SHARED_MEMORY: Final = 16 * MEBIBYTE
OPEN_FILES: Final = 256


def is_root() -> bool:
    """Whether this is the machine's root, and not one of a user namespace, where a user's processes are counted."""
    first = Path("/proc/self/uid_map").read_text().split(maxsplit=2)[:2]
    return os.geteuid() == 0 and first == ["0", "0"]


def outer_words(settings: BubblewrapSettings) -> list[str]:
    """As root: a first bubblewrap that shows what only root may open, and from which nobody goes on. Else nothing.

    Processes are counted by user, and root's are not counted at all: within a namespace, too, where root has made it.
    Nobody's processes die with root's only where these are the first of a namespace, hence one of processes here too.
    """
    if not is_root():
        return []
    return [
        *(program("bwrap"), "--die-with-parent", "--unshare-pid", *view(settings)),
        *("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev", "--dir", "/tmp"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP", "--"),
        *(program("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--"),
    ]


def inner_words(settings: BubblewrapSettings) -> list[str]:
    """The sandbox itself; more options may follow, then `--` and `limits`."""
    return [
        *(program("bwrap"), "--die-with-parent", "--new-session"),
        # Each that there is, said one by one: those of --unshare-all are tried only.
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"),
        *("--disable-userns", "--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"),
        *(["--ro-bind", "/", "/"] if is_root() else view(settings)),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY), "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--size", str(settings.disk_mib * MEBIBYTE), "--perms", "1777", "--tmpfs", "/tmp", "--dir", FOLDER),
        *_bound(path for path in shown(settings) if path.is_relative_to("/tmp")),
        # Both are in memory and of no limited size.
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER),
        *(word for name, value in _variables(settings).items() for word in ("--setenv", name, value)),
    ]


def limits(settings: BubblewrapSettings) -> list[str]:
    """What a process in the sandbox may take; set inside, for a namespace counts the processes that began in it."""
    values = {
        "as": settings.memory_mib * MEBIBYTE,
        "cpu": f"{settings.cpu_s}:{settings.cpu_s + 1}",
        "nproc": settings.processes,
        "fsize": settings.file_mib * MEBIBYTE,
        "nofile": OPEN_FILES,
        "core": 0,
    }
    return [program("prlimit"), *(f"--{name}={value}" for name, value in values.items()), "--"]


def view(settings: BubblewrapSettings) -> list[str]:
    """What is shown of the machine's files, to be read only."""
    words = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            words += ["--ro-bind", name, name]
    return [*words, *_bound(shown(settings))]


def shown(settings: BubblewrapSettings) -> list[Path]:
    """Folders and files that a command may read, each beside the one that it may be a link to.

    Raises:
        ConfigError: one that the settings name is not there.
    """
    if missing := [str(path) for path in settings.paths if not path.exists()]:
        raise ConfigError(f"paths of the sandbox bubblewrap are not there: {', '.join(missing)}")
    wanted = [Path("/usr"), *map(Path, LINKED), *_prefixes(_python(settings)), *settings.paths]
    found = {each for path in wanted if path.exists() for each in (path, path.resolve())}
    return sorted(path for path in found if not found.intersection(path.parents))


def _bound(paths: Iterable[Path]) -> list[str]:
    words = []
    for path in paths:
        # Otherwise bubblewrap makes them, and only their owner may pass.
        for parent in reversed(path.parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(path), str(path)]
    return words


def _variables(settings: BubblewrapSettings) -> dict[str, str]:
    search = [str(_python(settings).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    # One thread for each of a large machine's cores would be more than a command may have.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    own = {"PATH": ":".join(dict.fromkeys(search)), "HOME": FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    return own | threads | settings.variables


def _python(settings: BubblewrapSettings) -> Path:
    return settings.python or Path(sys.executable)


@cache
def _prefixes(python: Path) -> Sequence[Path]:
    """Where an interpreter and its libraries lie."""
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
