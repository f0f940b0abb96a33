"""Programs that sandboxes need, and errors that name the package to install."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Final

from areal_core.errors import ConfigError

PROGRAMS: Final = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""Programs that bubblewrap sandboxes run, and the package of Debian, Ubuntu and Fedora that has each."""


@cache
def find_program(name: str) -> str:
    """Return the path of one of `PROGRAMS`.

    Raises:
        ConfigError: it is not installed.
    """
    path = shutil.which(name)
    if path is None:
        package = PROGRAMS[name]
        raise ConfigError(
            f"the sandbox bubblewrap needs the program {name}, which is not installed on this machine",
            hints=(f"apt-get install {package} (Debian, Ubuntu), dnf install {package} (Fedora, RHEL)",),
        )
    return path


def installed_program(*names: str) -> str:
    """Return the first of these programs that is installed. Without names: podman or docker.

    Raises:
        ConfigError: none of them is installed.
    """
    for name in names or ("podman", "docker"):
        if shutil.which(name):
            return name
    raise ConfigError(
        f"the sandbox container needs {names[0]}, which is not installed on this machine"
        if names
        else "the sandbox container needs docker or podman, and neither is installed on this machine",
        hints=("apt-get install podman (Debian, Ubuntu), dnf install podman (Fedora, RHEL)",),
    )
