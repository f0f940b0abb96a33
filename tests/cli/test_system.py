"""On a system without pidfd, prctl or /proc, every command ends with one sentence and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import areal_core

PROC = """
import io
really_open = io.open
def masked_open(file, *rest, **named):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return really_open(file, *rest, **named)
io.open = masked_open
"""
PRCTL = "import ctypes\nctypes.CDLL = lambda *rest: object()\n"
PIDFD = "import os\ndel os.pidfd_open\n"
OLD_KERNEL = """
import os
def refuse(pid, flags=0):
    raise OSError(38, "Function not implemented")
os.pidfd_open = refuse
"""
MACOS = f"{PIDFD}{PRCTL}{PROC}\nimport sys\nsys.platform = 'darwin'\n"
WINDOWS = f"{PIDFD}{PRCTL}{PROC}\nimport shutil, signal, sys\ndel signal.SIGHUP\nsys.platform = 'win32'\n"
"""`shutil` is imported first: it imports a module of Windows where the platform is win32."""
NEEDS = "areal: error: areal stops the processes of a run with pidfd, prctl and /proc, and"
MASKS = {
    "macos": (MACOS, "areal: error: areal runs on Linux only, and this is macOS: use a Linux machine\n"),
    "windows": (WINDOWS, "areal: error: areal runs on Linux only, and this is Windows: use WSL2, which is Linux\n"),
    "python": (PIDFD, f"{NEEDS} this Python was built without pidfd: use one that was built on Linux 5.3 or newer\n"),
    "kernel": (
        OLD_KERNEL,
        f"{NEEDS} this system refuses pidfd (Function not implemented): use Linux 5.3 or newer\n",
    ),
    "prctl": (PRCTL, f"{NEEDS} the C library of this Python has no prctl: use a Python for Linux\n"),
    "proc": (PROC, f"{NEEDS} /proc cannot be read here (No such file or directory): mount it\n"),
}
COMMANDS = ["run --plugins grpo", "doctor", "plugins", "config show", "status", "nosuchplugin", "nosuchplugin --help"]


def areal(folder: Path, mask: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the `areal` program in a Python that executes `mask` when it starts."""
    (folder / "sitecustomize.py").write_text(mask)
    paths = os.pathsep.join((str(folder), str(Path(areal_core.__file__).parents[1])))
    return subprocess.run(
        [sys.executable, "-B", "-m", "areal_core", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", MASKS)
def test_a_command_ends_with_one_sentence(name: str, tmp_path: Path) -> None:
    mask, message = MASKS[name]
    done = areal(tmp_path, mask, "run", "--plugins", "grpo")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_passes_the_check(command: str, tmp_path: Path) -> None:
    mask, message = MASKS["macos"]
    done = areal(tmp_path, mask, *command.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("name", ["macos", "windows"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"]], ids=" ".join)
def test_help_and_version_work_everywhere(name: str, words: list[str], tmp_path: Path) -> None:
    done = areal(tmp_path, MASKS[name][0], *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("usage: areal", f"areal {areal_core.__version__}\n"))


def test_linux_passes(tmp_path: Path) -> None:
    done = areal(tmp_path, "", "config", "show")
    assert "pidfd" not in done.stderr
    assert "Linux" not in done.stderr
