"""Programs of this machine that sandboxes are made of, and what to say where one is missing."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Final

from areal_core.errors import ConfigError

PROGRAMS: Final = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""What is run, and the package of Debian, Ubuntu and Fedora that has it."""


@cache
def program(name: str) -> str:
    """Where one of `PROGRAMS` lies.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which(name)
    if found is None:
        package = PROGRAMS[name]
        raise ConfigError(
            f"the sandbox bubblewrap needs the program {name}, which is not installed on this machine",
            hints=(f"apt-get install {package} (Debian, Ubuntu), dnf install {package} (Fedora, RHEL)",),
        )
    return found


def found_program(*names: str) -> str:
    """Which of some programs is installed; without names, of podman and docker.

    Raises:
        ConfigError: none is.
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
