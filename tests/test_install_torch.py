"""`tools/install_torch.py` chooses the build of PyTorch: with the real pip, and a local index in place of PyTorch's."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(__file__).parents[1] / "tools" / "install_torch.py"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has two builds to choose from")


def write_wheel(folder: Path, name: str, version: str, *requires: str, size: int = 0) -> None:
    """Write a wheel with one file of `size` bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
        wheel.writestr(f"{name}.bin", bytes(size))


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a folder as a package index; return its address."""
    servers = []

    def start(folder: Path) -> str:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., str]:
    """Run the script as a user without any configuration of pip; return what it prints."""

    def run(*arguments: str, **environment: str) -> str:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "torch", "--plan", *arguments],
            env={**kept, "HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_torch_in_the_environment_overrides_everything(plan: Callable[..., str]) -> None:
    printed = plan(TORCH="torch==2.9.0 --no-deps")
    assert "PyTorch: TORCH=torch==2.9.0 --no-deps" in printed
    assert "pip install torch==2.9.0 --no-deps" in printed


def test_a_cpu_build_that_pip_is_configured_with_is_taken(plan: Callable[..., str], tmp_path: Path) -> None:
    write_wheel(tmp_path / "links", "torch", "9.9.9+cpu")
    printed = plan(PIP_FIND_LINKS=str(tmp_path / "links"), PIP_NO_INDEX="1")
    assert "the build for CPUs from the sources that pip is configured with" in printed
    assert printed.rstrip().endswith("pip install torch")


def test_pytorchs_index_serves_this_one_call(
    plan: Callable[..., str], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    write_wheel(tmp_path / "pypi" / "torch", "torch", "9.9.9", "nvidia-cublas")
    write_wheel(tmp_path / "pypi" / "nvidia-cublas", "nvidia_cublas", "1.0")
    write_wheel(tmp_path / "pytorch" / "torch", "torch", "9.9.9+cpu")
    index = serve(tmp_path / "pytorch")
    printed = plan("--cpu-index", index, PIP_INDEX_URL=serve(tmp_path / "pypi"))
    assert f"PyTorch: the build for CPUs from {index}" in printed
    assert printed.rstrip().endswith(f"pip install torch --index-url {index}")


def test_without_a_cpu_build_the_size_of_the_other_is_printed(
    plan: Callable[..., str], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    write_wheel(tmp_path / "pypi" / "torch", "torch", "9.9.9", "nvidia-cublas")
    write_wheel(tmp_path / "pypi" / "nvidia-cublas", "nvidia_cublas", "1.0", size=150_000_000)
    index = serve(tmp_path / "pypi")
    printed = plan("--cpu-index", f"{index}/nothing", PIP_INDEX_URL=index)
    assert "PyTorch: the build for CUDA (0.2 GB), because" in printed
    assert printed.count("\n") == 2, "one line for the decision, one for the call"
