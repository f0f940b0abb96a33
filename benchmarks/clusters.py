"""Clusters of three virtual nodes of this machine, and runs on them: what benchmarks of launchers have in common."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.launchers.identity import processes_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parents[1]
AREAL = [sys.executable, "-m", "areal_core"]
HANG_S = 900.0
"""A wait that is longer has no end, on however slow a machine."""
STEPS = 16
CONFIG = f"""\
plugins: [grpo, hf, fsdp]
steps: {STEPS}
deterministic: true
model: {{path: model}}
dataset: grpo/additions
workflow: single_turn
rewards: [grpo/right_result, "parts.py:slow"]
sampling: {{max_new_tokens: 8}}
rollout: {{batch_size: 4, group_size: 4, max_staleness: 0, stall_timeout_s: 600}}
inference_engine: {{type: hf, max_concurrent_requests: 16}}
train_engine: {{type: fsdp, learning_rate: 1e-2}}
algorithm: grpo
checkpoint: {{every: 2}}
"""
PARTS = """\
import time

def slow(completion):
    time.sleep(0.1)  # a run that is over before the fault would show nothing
    return 0.0
"""
SPEECHLESS = {"engine": "areal_hf.server", "reward": "areal_core.rewards.worker"}
"""Processes that do not tell their names, by their commands."""
MODEL = """\
from pathlib import Path
from areal_grpo.demonstration.model import make_model
make_model(Path("model"), hidden=32, layers=1, heads=2)
"""


def wait_for(condition: Callable[[], object], what: str, seconds: float = HANG_S) -> float:
    """Wait until something is so; for how long that was."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def load(path: str) -> Any:
    """The module in a file of this repository: the tests' clusters are not installed."""
    specification = importlib.util.spec_from_file_location(Path(path).stem + "_cluster", ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


class Run:
    """A run in a folder of its own; a cluster starts it and says what of it lives.

    Args:
        folder: where it is.
        config: another one than the small run on a CPU, whose model is made here.
        speechless: how to know further processes that do not tell their names, by their commands.
    """

    def __init__(self, folder: Path, config: str = "", speechless: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.path = folder / "run"
        self._speechless = {**SPEECHLESS, **(speechless or {})}
        (folder / "run.yaml").write_text(config or CONFIG)
        (folder / "parts.py").write_text(PARTS)
        if not config:
            subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True)

    def steps(self) -> int:
        """How many steps are done."""
        with suppress(OSError):
            return (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def processes(self) -> list[tuple[int, dict[str, str], str]]:
        """What lives of it on any node: number, environment, command line."""
        found = []
        for token in {path.read_text() for path in self.path.glob("attempts/*/token")}:
            for pid in processes_with("AREAL_TOKEN", token):
                with suppress(OSError):
                    lines = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append((pid, dict(line.partition("=")[::2] for line in lines), command))
        return found

    def pid(self, name: str) -> int:
        """Of a process of the run by its name; of the warden of a node by `warden NODE`."""
        for pid, variables, command in self.processes():
            if "keeper.py" in command:
                continue
            if name.startswith("warden "):
                if "launchers.warden" in command and variables.get("AREAL_NODE") == name.removeprefix("warden "):
                    return pid
            elif name == variables.get("AREAL_PROCESS") or self._speechless.get(name, "nothing") in command:
                return pid
        raise LookupError(f"{name} does not run: {[command for _, _, command in self.processes()]}")

    def node(self, name: str) -> str:
        """On which node a process stands."""
        return next(v["AREAL_NODE"] for _, v, _ in self.processes() if v.get("AREAL_PROCESS") == name)


class Local:
    """Runs on two nodes that this machine plays, with a share of its GPUs each."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._run: Run | None = None

    def prepare(self) -> None:
        """All nodes are up: they begin with the run."""

    def start(self, run: Run, *, resume: bool = False) -> None:
        """Start it or go on with it."""
        words = ["run", "--resume", "run"] if resume else ["run", "run.yaml", "run_dir=run"]
        self._log, self._run = run.folder / "out", run
        with self._log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen([*AREAL, *words], cwd=run.folder, env=environment, stdout=log, stderr=log)

    def log(self) -> str:
        """What it has said."""
        assert self._log is not None
        return self._log.read_text()

    def end(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def signal_node(self, name: str, number: int) -> None:
        """To everything on it."""
        assert self._run is not None
        for pid, variables, _ in self._run.processes():
            if variables.get("AREAL_NODE") == name:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Ray:
    """Runs on three nodes of true Ray; the supervisor is on none of them."""

    def __init__(self, folder: Path) -> None:
        del folder
        self.cluster = load("tests/integration/conftest.py").RayCluster()
        self.cluster.repair()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def prepare(self) -> None:
        """All nodes up."""
        self.cluster.repair()

    def start(self, run: Run, *, resume: bool = False) -> None:
        """Start it or go on with it."""
        where = [f"launcher.address={self.cluster.address}", f"launcher.host={self.cluster.host}"]
        where.append("launcher.excluded_nodes=[n0]")  # the head, which is lost in a row of its own
        words = ["run", "--resume", "run", *where] if resume else [
            "run", "run.yaml", "run_dir=run", *where, "launcher.type=ray", "launcher.nodes=2",
            "launcher.trainer_processes=2", "launcher.placement_timeout_s=300",
        ]  # fmt: skip
        self._log = run.folder / "out"
        with self._log.open("ab") as log:
            environment = {**self.cluster.environment, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen([*AREAL, *words], cwd=run.folder, env=environment, stdout=log, stderr=log)

    def log(self) -> str:
        """What it has said."""
        assert self._log is not None
        return self._log.read_text()

    def end(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def kill_parent(self, run: Run) -> None:
        """The supervisor's end, as by the out-of-memory killer."""
        del run
        assert self._process is not None
        self._process.kill()

    def kill_node(self, name: str) -> None:
        """As a power failure does."""
        self.cluster.kill(name)

    def signal_node(self, name: str, number: int) -> None:
        """To everything on it."""
        for pid in load("tests/integration/conftest.py").descendants(self.cluster.nodes[name].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_head(self) -> None:
        """The head node, on which nothing of the run stands."""
        self.cluster.kill("n0")

    def restore_head(self) -> None:
        """A head that died takes its cluster with it: a new one."""
        for name in list(self.cluster.nodes):
            self.cluster.kill(name)
        self.cluster.repair()

    def reset(self) -> None:
        """Nothing left of the last run."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Switch it off."""
        self.reset()
        self.cluster.close()


class Slurm:
    """Runs on three nodes of true SLURM; the supervisor is the batch step, on the first node of the job."""

    def __init__(self, folder: Path) -> None:
        module = load("plugins/areal_slurm/tests/conftest.py")
        if reason := module.why_no_slurm():
            raise SystemExit(reason)
        self.cluster = module.Cluster(folder)
        self.cluster.start()
        self._job = ""
        self._run: Run | None = None

    def prepare(self) -> None:
        """All nodes idle."""
        self.cluster.reset()

    def start(self, run: Run, *, resume: bool = False) -> None:
        """Submit it."""
        words = ["--resume", "run", "--nodes=3"] if resume else ["run.yaml", "run_dir=run", "--nodes=3", "--gres=gpu:2"]
        if not resume:
            words += ["launcher.type=slurm", "launcher.trainer_processes=3"]
        said = self.cluster.areal("slurm", "submit", *words, folder=run.folder)
        self._job = re.findall(r"^job +(\d+)$", said, re.MULTILINE)[0]
        self._run = run

    def log(self) -> str:
        """What it has said."""
        assert self._run is not None
        with suppress(OSError):
            return (self._run.path / "slurm.log").read_text()
        return ""

    def end(self) -> int | None:
        """Its exit code; None while it runs or waits."""
        with suppress(AssertionError):  # where the controller is away
            job = self.cluster.job(self._job)
            if job["JobState"] not in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}:
                return int(job["ExitCode"].partition(":")[0]) or int(job["JobState"] != "COMPLETED")
        return None

    def kill_parent(self, run: Run) -> None:
        """The supervisor's end."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"--resume {run.path}" in command and "areal_core" in command:
                    os.kill(int(path.parent.name), signal.SIGKILL)

    def kill_node(self, name: str) -> None:
        """As a power failure does."""
        self.cluster.kill(name)

    def restore_node(self, name: str) -> None:
        """Switch it on again."""
        self.cluster.join(name)

    def signal_node(self, name: str, number: int) -> None:
        """To everything on it."""
        self.cluster.signal(name, number)

    def kill_head(self) -> None:
        """SLURM's controller; its daemons on nodes go on."""
        self.cluster.kill("slurmctld")

    def restore_head(self) -> None:
        """Start it again, with the state that it left."""
        self.cluster._start("slurmctld", ["slurmctld", "-D"])

    def reset(self) -> None:
        """Nothing left of the last run."""
        self.cluster.reset()

    def close(self) -> None:
        """Switch it off."""
        self.cluster.close()
