"""Real runs: real processes, a real (tiny) model, `areal` as a user starts it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.disk import read_lines
from areal_core.driver import ask_driver
from areal_core.runs import RunFolder
from areal_core.runtime.messages import StatusRequest
from areal_grpo.demonstration.model import make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = """\
plugins: [grpo, hf, fsdp, view]
steps: 4
model: {path: model}
dataset: grpo/additions
workflow: single_turn
rewards:
  - type: grpo/right_result
  - "parts.py:digits"
sampling: {max_new_tokens: 8}
rollout: {batch_size: 4, group_size: 4, max_staleness: 1, stall_timeout_s: 600}
inference_engine: {type: hf, max_concurrent_requests: 32}
train_engine: {type: fsdp, learning_rate: 1e-2}
algorithm: grpo
"""

PARTS = """\
def digits(completion):
    return sum(character.isdigit() for character in completion) / 8
"""


@dataclass
class Outcome:
    """What a program did."""

    code: int
    out: str
    err: str


class Workplace:
    """A folder with a tiny model and a config, in which `areal` is run."""

    command = (sys.executable, "-m", "areal_core")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "AREAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        # Ray puts its own debugger here, for the process in which a test called ray.init().
        self.environment.pop("PYTHONBREAKPOINT", None)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `areal` and return at once."""
        return subprocess.Popen(
            [*self.command, *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def areal(self, *words: str, timeout: float = 600) -> Outcome:
        """Run `areal` to its end."""
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout)
        return Outcome(process.returncode, out, err)

    def pid(self, name: str, run: str = "run") -> int:
        """The process of a run that goes by a name: its guard's too (`guard:NAME`), or that of a reward process."""
        kind, _, member = name.rpartition(":")
        if name.startswith("reward-"):
            found = [pid for pid in descendants(self.pid("worker-0", run)) if "rewards.worker" in program(pid)]
            return found[int(name.removeprefix("reward-"))]
        attempt = RunFolder(self.folder / run).last_attempt
        assert attempt is not None
        driving = ask_driver(attempt, StatusRequest(), 60)
        own: int = driving.processes[member].pid
        return parent(own) if kind == "guard" else own

    def processes(self, process: subprocess.Popen[str]) -> list[int]:
        """What a program has started, and what these have."""
        return descendants(process.pid)

    def metrics(self, run: str = "run") -> list[dict[str, Any]]:
        """Lines of a run's metrics."""
        return read_lines(self.folder / run / "metrics.jsonl")

    def weights(self, run: str = "run") -> bytes:
        """The exported parameters of a run."""
        return (self.folder / run / "model" / "model.safetensors").read_bytes()

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 600) -> None:
        """Wait until something is so, and fail with the program's words where it ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Everything that a process has started, and what these have."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                children.append(int(path.parent.name))
    return children + [deeper for child in children for deeper in descendants(child)]


def program(pid: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def parent(pid: int) -> int:
    """Of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model with random weights."""
    return make_model(tmp_path_factory.mktemp("model") / "model", hidden=32, layers=1, heads=2)


@pytest.fixture(scope="session")
def lay_out(tiny_model: Path) -> Callable[[Path], None]:
    """Puts the tiny model, `run.yaml` and what it names into a folder."""

    def lay_out(folder: Path) -> None:
        (folder / "model").symlink_to(tiny_model)
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "parts.py").write_text(PARTS)

    return lay_out


@pytest.fixture(scope="session")
def workplace_in(lay_out: Callable[[Path], None]) -> Callable[[Path], Workplace]:
    """Makes a folder a place to run `areal` in."""

    def workplace_in(folder: Path) -> Workplace:
        lay_out(folder)
        return Workplace(folder)

    return workplace_in


@pytest.fixture
def workplace(tmp_path: Path, workplace_in: Callable[[Path], Workplace]) -> Workplace:
    """A place to run `areal` in."""
    return workplace_in(tmp_path)


HANG_S = 300


class RayCluster:
    """A head `n0` and nodes `n1`, `n2` with two pretended GPUs each, on loopback addresses of their own.

    Ray replaces 127.0.0.1 by the machine's outward address.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # below it are sockets: the path must be short
        self.network = f"127.{os.getpid() % 250 + 2}.{secrets.randbelow(250) + 2}"
        self.host = f"{self.network}.2"
        self.address, self.jobs = f"{self.host}:{self._port()}", f"http://{self.host}:{self._port()}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_ADDRESS": self.address,
        }  # fmt: skip

    def _port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            return int(probe.getsockname()[1])

    def repair(self) -> None:
        """Start what is not there, one after the other: together they time out on a busy machine."""
        _, _, port = self.jobs.rpartition(":")
        host, _, own = self.address.partition(":")
        head = ("--head", f"--port={own}", f"--temp-dir={self.folder}", "--num-gpus=0",
                "--include-dashboard=true", f"--dashboard-host={host}", f"--dashboard-port={port}")  # fmt: skip
        for number in range(3):
            name = f"n{number}"
            if name not in self.nodes:
                self._start(name, number, head if not number else (f"--address={self.address}", "--num-gpus=2"))

    def _start(self, name: str, number: int, options: tuple[str, ...]) -> None:
        command = ["setpriv", "--pdeathsig=KILL",
                   "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m",
                   "ray.scripts.scripts", "start", "--block", "--num-cpus=4", f"--node-name={name}",
                   f"--node-ip-address={self.network}.{number + 2}", f"--object-store-memory={80 << 20}",
                   *options]  # fmt: skip
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            self.nodes[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + HANG_S
        while "Ray runtime started" not in log.read_text() and self.nodes[name].poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        assert self.nodes[name].poll() is None, log.read_text()

    def kill(self, name: str) -> None:
        """Switch a node off."""
        process = self.nodes.pop(name)
        process.kill()
        process.wait()

    def processes(self, name: str) -> list[int]:
        """All processes of a node."""
        return descendants(self.nodes[name].pid)

    def close(self) -> None:
        """Switch all off."""
        for name in list(self.nodes):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def one_cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(one_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """All nodes up; this program's environment is that of the cluster, whose token Ray reads anew."""
    from ray._private.authentication_test_utils import reset_auth_token_state

    for name, value in one_cluster.environment.items():
        monkeypatch.setenv(name, value)
    reset_auth_token_state()
    one_cluster.repair()
    return one_cluster
