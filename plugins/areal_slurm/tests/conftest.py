"""A SLURM cluster of three virtual nodes on this machine: true daemons, loopback addresses, pretended GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from areal_core.runtime.network import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GPUS_PER_NODE = 2
CORES_PER_NODE = 4
START_S = 120.0
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "unshare", "setpriv")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=20
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,preempt_send_user_signal
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=60
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
"""A requeued job is eligible when its credential has expired, by default after 120 s."""


class Cluster:
    """One `munged`, one `slurmctld`, and a `slurmd` for each virtual node `n1`, `n2`, `n3`.

    Each `slurmd` runs in a process namespace of its own, so that a node ends with all that it ever started.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = ["n1", "n2", "n3"]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "AREAL_CACHE": str(folder / "cache"),
        }
        self._sockets = Path(tempfile.mkdtemp(prefix="munge-", dir="/run"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration and start the daemons."""
        self._write()
        self._start("munged", self._munged())
        wait_for((self._sockets / "socket").is_socket, "munged", START_S)
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self.join(node)
        self.wait_idle()

    def join(self, node: str) -> None:
        """Start the daemon of a node (again)."""
        namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._start(node, [*namespace, "slurmd", "-D", "-N", node])

    def kill(self, node: str) -> None:
        """End a node as a power failure does: its daemon and everything that it started, without a word."""
        daemon = self._daemons.pop(node)
        daemon.kill()  # the namespace's first process ends with it, and the kernel kills the rest
        daemon.wait()

    def processes(self, node: str) -> list[int]:
        """All processes of a node."""
        first = subprocess.run(
            ["pgrep", "-P", str(self._daemons[node].pid)], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
        found = []
        for path in Path("/proc").glob("[0-9]*/ns/pid"):
            with suppress(OSError):
                if path.readlink() == namespace:
                    found.append(int(path.parts[2]))
        return found

    def signal(self, node: str, number: int) -> None:
        """Send a signal to everything on a node."""
        for pid in self.processes(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self, *words: str, folder: Path | None = None) -> str:
        """What a program of SLURM or areal says; it must succeed."""
        done = subprocess.run(
            words, env=self.environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def areal(self, *words: str, folder: Path | None = None) -> str:
        """What `areal` says, on a machine that is no node."""
        return self.run(sys.executable, "-m", "areal_core", *words, folder=folder)

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job."""
        text = self.run("scontrol", "show", "job", number)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait_for_job(self, number: str, states: Sequence[str], log: Path, seconds: float = 600) -> dict[str, str]:
        """Wait until a job is in a state, and fail with its log where it never is."""
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            ended = job["JobState"] in {"COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "PREEMPTED"}
            if ended or time.monotonic() > deadline:
                words = log.read_text() if log.is_file() else "no log"
                raise AssertionError(f"the job {number} is {job['JobState']}, not {states}: {job}\n{words}")
            time.sleep(0.2)
        return job

    def states(self) -> dict[str, str]:
        """The nodes' states, such as `idle`, `mixed`, `down*`."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %T"], env=self.environment, capture_output=True, text=True, check=False
        )
        return dict(line.split()[:2] for line in done.stdout.splitlines())  # type: ignore[misc]

    def wait_idle(self) -> None:
        """Until every node is there and has nothing to do."""
        deadline = time.monotonic() + START_S
        while self.states() != dict.fromkeys(self.nodes, "idle"):
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            logs = {name: (self.folder / f"{name}.log").read_text()[-2000:] for name in dead}
            assert not dead, f"daemons have ended: {logs}"
            assert time.monotonic() < deadline, f"SLURM is not up: {self.states()}"
            time.sleep(0.1)

    def reset(self) -> None:
        """As it was at the beginning: no job, all nodes."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
        subprocess.run(["scancel", "--user=root", "--full", "--signal=KILL"], env=self.environment, check=False)
        for node in self.nodes:
            if node in self._daemons:
                self.signal(node, signal.SIGCONT)
            else:
                self.join(node)
        self.wait_idle()

    def close(self) -> None:
        """End everything."""
        for name in [*self.nodes, "slurmctld", "munged"]:
            if name in self._daemons:
                self.kill(name)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _write(self) -> None:
        ports = _free_ports(len(self.nodes) + 1)
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES_PER_NODE}"
            f" RealMemory=4000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        )
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(parents=True)
        (self.folder / "state").mkdir()
        for device in range(GPUS_PER_NODE):
            os.mknod(self.folder / f"gpu{device}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
        munge = self._sockets / "socket"
        (self.folder / "slurm.conf").write_text(
            SLURM_CONF.format(host=host, port=ports[0], munge=munge, folder=self.folder, nodes=nodes)
        )
        devices = f"{self.folder}/gpu[0-{GPUS_PER_NODE - 1}]"
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={devices}\n")

    def _munged(self) -> list[str]:
        key = self._sockets / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = {"socket": "socket", "key-file": "munge.key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={self._sockets / name}" for option, name in names.items()]
        return ["munged", "--foreground", "--force", "--num-threads=2", *options]

    def _start(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 300) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def why_no_slurm() -> str:
    """Why a cluster cannot be played here; empty where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"no true SLURM here: {', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    if os.geteuid():
        return "no true SLURM here: only root may start several nodes on a machine"
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
        return "no true SLURM here: this machine allows no process namespaces"
    return ""


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(_cluster: Cluster) -> Cluster:
    """A cluster whose nodes are all idle."""
    _cluster.reset()
    return _cluster
