"""Faults of each role in true runs on a cluster of three virtual nodes of this machine, and what became of the run.

    python benchmarks/cluster_faults.py ray|slurm [--only WORD ...] [--out TABLE.json]

Each row is a run of its own: two ranks, a controller, reward processes, an embedded engine. After three steps one thing
happens to it; then it must come to its last step by itself, or end and say so, and then be resumed. Needs root, and
what the tests of the two launchers need (docs/clusters-ray.md, docs/clusters-slurm.md). Some thirty minutes each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_core.launchers.identity import processes_with

ROOT = Path(__file__).parents[1]
AREAL = [sys.executable, "-m", "areal_core"]
HANG_S = 900.0
"""A wait that is longer has no end, on however slow a machine."""
SILENCE_S = 80.0
"""Longer than the lease of 60 s, so that what was silent must find itself given up."""
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
MODEL = """\
from pathlib import Path
from areal_grpo.demonstration.model import make_model
make_model(Path("model"), hidden=32, layers=1, heads=2)
"""
NOTICED = re.compile(
    r"was killed|was lost|is lost|is silent|silent for|is gone|left out|ended with|going back|replaced"
)


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
    """A run in a folder of its own; a cluster starts it and says what of it lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run"
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "parts.py").write_text(PARTS)
        subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True)

    def steps(self) -> int:
        """How many steps are done."""
        with suppress(OSError):
            return (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def processes(self) -> list[tuple[int, dict[str, str], str]]:
        """What lives of it on any node: number, environment, command line."""
        found = []
        for token in {path.read_text() for path in self.path.glob("epochs/*/token")}:
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
            elif variables.get("AREAL_PROCESS", "").startswith(name):
                return pid
        raise LookupError(f"{name} does not run: {self.processes()}")

    def node(self, name: str) -> str:
        """On which node a process stands."""
        return next(v["AREAL_NODE"] for _, v, _ in self.processes() if v.get("AREAL_PROCESS") == name)


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


@dataclass
class Row:
    """What became of a run."""

    fault: str
    noticed_s: float | None = None
    """Until the first line that tells of it."""
    goes_on_s: float | None = None
    """Until the next step was done."""
    happened: str = ""
    exit_code: int | None = None
    resumed: str = ""
    steps: int = 0
    left: int = 0
    """Processes of the run anywhere, 100 s after its end."""
    audit: str = ""


Faults = dict[str, Callable[[Any, Run], None]]


def kill(name: str) -> Callable[[Any, Run], None]:
    """SIGKILL for a process of the run."""
    return lambda cluster, run: os.kill(run.pid(name), signal.SIGKILL)


def silence(name: str) -> Callable[[Any, Run], None]:
    """SIGSTOP for a process, for longer than the lease, and SIGCONT."""

    def stop(cluster: Any, run: Run) -> None:
        pid = run.pid(name)
        os.kill(pid, signal.SIGSTOP)
        later(lambda: os.kill(pid, signal.SIGCONT))

    return stop


def kill_warden(cluster: Any, run: Run) -> None:
    """Of the node of the last rank."""
    os.kill(run.pid(f"warden {run.node('trainer-1')}"), signal.SIGKILL)


def lose_node(of: str) -> Callable[[Any, Run], None]:
    """Switch off the node of a process."""
    return lambda cluster, run: cluster.kill_node(run.node(of))


def silence_node(cluster: Any, run: Run) -> None:
    """Stop everything on a node for longer than the lease; then it wakes."""
    name = run.node("trainer-1")
    cluster.signal_node(name, signal.SIGSTOP)
    later(lambda: cluster.signal_node(name, signal.SIGCONT))


def kill_parent(cluster: Any, run: Run) -> None:
    """The supervisor."""
    cluster.kill_parent(run)


def kill_head(cluster: Any, run: Run) -> None:
    """What the cluster is managed by."""
    del run
    cluster.kill_head()


FAULTS: Faults = {
    "rank 0 killed": kill("trainer-0"),
    "rank 1 killed": kill("trainer-1"),
    "controller killed": kill("controller"),
    "engine killed": kill("engine"),
    "reward process killed": kill("reward"),
    "warden killed": kill_warden,
    "rank 1 stopped 80 s": silence("trainer-1"),
    "controller stopped 80 s": silence("controller"),
    "node of rank 1 lost": lose_node("trainer-1"),
    "node of rank 1 stopped 80 s": silence_node,
    "node of rank 0 lost": lose_node("trainer-0"),
    "parent killed": kill_parent,
    "head lost": kill_head,
}
_later: list[tuple[float, Callable[[], None]]] = []


def later(action: Callable[[], None]) -> None:
    """Do it when the silence is over."""
    _later.append((time.monotonic() + SILENCE_S, action))


def do_what_is_due() -> None:
    """What `later` was told."""
    while _later and _later[0][0] <= time.monotonic():
        with suppress(ProcessLookupError, KeyError, subprocess.CalledProcessError):
            _later.pop(0)[1]()


def try_fault(cluster: Any, name: str, folder: Path) -> Row:
    """One run, one fault."""
    run, row = Run(folder), Row(name)
    cluster.prepare()
    cluster.start(run)
    wait_for(lambda: run.steps() >= 3 or cluster.end() is not None, "three steps")
    if cluster.end() is not None:
        raise RuntimeError(f"the run did not come to three steps:\n{cluster.log()[-3000:]}")
    known, done, began = len(cluster.log()), run.steps(), time.monotonic()
    FAULTS[name](cluster, run)

    def look() -> bool:
        do_what_is_due()
        since = time.monotonic() - began
        if row.noticed_s is None and (found := NOTICED.search(news := cluster.log()[known:])):
            row.noticed_s = since
            row.happened = news[news.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
        if row.goes_on_s is None and run.steps() > done and row.noticed_s is not None:
            row.goes_on_s = since
        return cluster.end() is not None and not _later

    wait_for(look, f"the end of the run\n{cluster.log()[known:]}")
    row.exit_code = cluster.end()
    news = cluster.log()[known:]
    back = re.findall(r"going back to the last checkpoint|queued again|is started again|replaced", news)
    row.happened += f" -> {', '.join(dict.fromkeys(back))}" if back else ""
    with suppress(TimeoutError):
        wait_for(lambda: not run.processes(), "the end of all processes", 100)
    row.left = len(run.processes())
    if row.exit_code != 0:
        if name == "head lost":
            cluster.restore_head()
        cluster.prepare()
        cluster.start(run, resume=True)
        wait_for(lambda: cluster.end() is not None, "the end of the resumed run")
        row.resumed = f"exit code {cluster.end()}"
    row.steps = run.steps()
    if name == "head lost" and row.exit_code == 0:
        cluster.restore_head()
    audit = subprocess.run([*AREAL, "audit", "run", "--json"], cwd=folder, capture_output=True, text=True, check=False)
    row.audit = "clean" if audit.returncode == 0 else f"exit code {audit.returncode}: {audit.stdout[-300:]}"
    if row.exit_code != 0 or row.steps != STEPS or row.left or row.audit != "clean":
        print(cluster.log()[known:][-4000:], flush=True)
    return row


def seconds(value: float | None) -> str:
    """For a cell."""
    return "-" if value is None else f"{value:.1f}"


def main() -> None:
    """All faults in a row; the table is written as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", choices=["ray", "slurm"])
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name has one of these words in it")
    parser.add_argument("--out", type=Path, help="rows as JSON")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="areal-faults-", dir="/tmp"))
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", AREAL_CACHE=str(base / "cache"))
    rows: list[Row] = []
    (base / "cluster").mkdir()
    cluster: Any = (Ray if arguments.cluster == "ray" else Slurm)(base / "cluster")
    names = [name for name in FAULTS if not arguments.only or any(word in name for word in arguments.only)]
    print("| fault | noticed s | next step s | what was told | exit | resumed | steps | left | audit |", flush=True)
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    try:
        for number, name in enumerate(names):
            folder = base / f"run-{number}"
            folder.mkdir()
            try:
                row = try_fault(cluster, name, folder)
            except (TimeoutError, LookupError, RuntimeError, AssertionError, StopIteration) as error:
                row = Row(name, happened=f"{type(error).__name__}: {error}")
            _later.clear()
            rows.append(row)
            cells = (name, seconds(row.noticed_s), seconds(row.goes_on_s), row.happened, row.exit_code, row.resumed,
                     row.steps, row.left, row.audit)  # fmt: skip
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
            cluster.reset()
    finally:
        cluster.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
