"""Install PyTorch, choosing the build for CPUs on a Linux machine without an NVIDIA GPU.

    python tools/install_torch.py [REQUIREMENT] [--constraints FILE] [--python PYTHON] [--plan]

PyPI serves PyTorch for CUDA to Linux: several gigabytes of libraries, which a machine without a GPU cannot use.
This script decides once, in this order:

1. The environment variable TORCH, if it is set, is passed to `pip install` as it is.
2. A machine with an NVIDIA GPU, or one that does not run Linux, installs what pip finds.
3. If pip is configured with an index or with links (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf)
   and finds a build for CPUs there, it installs that one.
4. If PyTorch's own index for CPUs answers within five seconds, this one call of pip uses it.
5. Otherwise it installs the CUDA build and prints its size.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5
SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
"""Keys of pip's configuration that say where packages come from."""
GPU_FILES = ("dev/nvidia[0-9]*", "usr/lib/wsl/lib/libcuda.so.1")
"""Files below `/`, as patterns: one exists where NVIDIA's driver serves a GPU, on Linux or its Windows subsystem."""
FOR_CUDA = ("nvidia-", "cuda-", "triton")
"""First words of the distributions that only PyTorch for CUDA depends on."""


@dataclass(frozen=True)
class Decision:
    """What pip is called with, and why."""

    arguments: tuple[str, ...]
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    """Decide, print the decision, install. Return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirement", nargs="?", default="torch", help="such as torch==2.13.0 (default: torch)")
    parser.add_argument("--constraints", type=Path, help="a constraints file for pip")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install into (default: this one)")
    parser.add_argument("--cpu-index", default=CPU_INDEX, help="the index with builds for CPUs (default: PyTorch's)")
    parser.add_argument("--plan", action="store_true", help="print the decision and install nothing")
    arguments = parser.parse_args(argv)
    wanted = [arguments.requirement, *(["--constraint", str(arguments.constraints)] if arguments.constraints else [])]
    pip = Pip(arguments.python)
    try:
        decision = decide(pip, wanted, arguments.cpu_index)
    except PipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"PyTorch: {decision.reason}", flush=True)
    if arguments.plan:
        print(shlex.join(["pip", "install", *decision.arguments]))
        return 0
    return pip.install(*decision.arguments)


class PipError(Exception):
    """pip failed; the text holds the end of what it wrote."""


class Pip:
    """pip of one interpreter, as its user has configured it."""

    def __init__(self, python: str) -> None:
        self._command = (python, "-m", "pip", "--disable-pip-version-check")

    def install(self, *arguments: str) -> int:
        """Run `pip install`. Return its exit code."""
        return subprocess.run([*self._command, "install", "--quiet", *arguments], check=False).returncode

    def has_own_sources(self) -> bool:
        """Return whether the user's configuration or environment names an index or links."""
        listed = subprocess.run([*self._command, "config", "list"], capture_output=True, text=True, check=False).stdout
        keys = {line.split("=", 1)[0].split(".", 1)[-1].replace("_", "-").lower() for line in listed.splitlines()}
        return not keys.isdisjoint(SOURCES)

    def plan(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the distributions that `pip install` would install, as pip's installation report lists them.

        Raises:
            PipError: pip finds no solution.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            options = ("install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report))
            done = subprocess.run([*self._command, *options, *arguments], capture_output=True, text=True, check=False)
            if done.returncode:
                raise PipError(f"pip install {shlex.join(arguments)} failed:\n{done.stderr[-2000:]}")
            planned: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
            return planned


def decide(pip: Pip, wanted: Sequence[str], cpu_index: str) -> Decision:
    """Return the arguments for the one `pip install` of PyTorch.

    Raises:
        PipError: pip finds no PyTorch at all.
    """
    if chosen := os.environ.get("TORCH"):
        return Decision(tuple(shlex.split(chosen)), f"TORCH={chosen}")
    as_pip_finds = Decision(tuple(wanted), "the build that pip finds for this machine")
    if not sys.platform.startswith("linux") or has_nvidia_gpu():
        return as_pip_finds
    planned = None
    if pip.has_own_sources():
        planned = pip.plan(*wanted)
        if not needs_cuda(planned):
            return Decision(tuple(wanted), "the build for CPUs from the sources that pip is configured with")
    if answers(f"{cpu_index.rstrip('/')}/torch/"):
        return Decision((*wanted, "--index-url", cpu_index), f"the build for CPUs from {cpu_index}")
    planned = planned or pip.plan(*wanted)
    if not needs_cuda(planned):  # as on arm64, where PyPI has a build for CPUs
        return as_pip_finds
    return Decision(
        tuple(wanted),
        f"the build for CUDA{size_of(planned)}, because {cpu_index} does not answer. "
        "Stop this, and set TORCH or PIP_FIND_LINKS to a build for CPUs, to avoid it.",
    )


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver has a GPU here."""
    return any(any(Path("/").glob(pattern)) for pattern in GPU_FILES)


def needs_cuda(planned: Sequence[dict[str, Any]]) -> bool:
    """Return whether pip's plan holds the libraries of PyTorch for CUDA."""
    names = (entry["metadata"]["name"].lower().replace("_", "-") for entry in planned)
    return any(name.startswith(FOR_CUDA) for name in names)


def answers(address: str) -> bool:
    """Return whether an index page can be read within `PROBE_SECONDS`."""
    try:
        with urllib.request.urlopen(address, timeout=PROBE_SECONDS) as response:
            return bool(response.read(1))
    except (OSError, urllib.error.URLError):
        return False


def size_of(planned: Sequence[dict[str, Any]]) -> str:
    """Return ` (N.N GB)`, the download of a plan, or nothing where a server names no sizes."""
    addresses = [entry["download_info"]["url"] for entry in planned]
    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(_content_length, addresses))
    return f" ({sum(sizes) / 1e9:.1f} GB)" if sum(sizes) else ""


def _content_length(address: str) -> int:
    try:
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as response:
            return int(response.headers.get("Content-Length") or 0)
    except (OSError, urllib.error.URLError, ValueError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
