"""Machines that join a run: under torchrun, by hand, killed and started again, and after a killed driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from areal_core.config.layout import Layout
from areal_core.runtime.network import free_port
from areal_core.runtime.process_tree import kill_tree, processes_with
from areal_nodes.command import build_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HANG_S = 400
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {HANG_S} s: {what}"
        time.sleep(0.05)


class Group:
    """Programs of one run, each with the file that it writes to."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        self.run = workplace.folder / "run"
        self.programs: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program under a name."""
        with (self.workplace.folder / f"{name}.out").open("ab") as file:
            variables = {**self.workplace.environment, **environment}
            program = self.programs[name] = subprocess.Popen(
                command, cwd=self.workplace.folder, env=variables, stdout=file, stderr=file
            )
        return program

    def areal(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start `areal` under a name."""
        return self.start(name, *self.workplace.command, *words)

    def said(self, name: str) -> str:
        """What a program has written."""
        return (self.workplace.folder / f"{name}.out").read_text()

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many are done; a program that ends before is told with its words."""

        def are_done() -> bool:
            codes = {name: program.poll() for name, program in self.programs.items()}
            failed = {name: self.said(name) for name, code in codes.items() if code not in (None, -signal.SIGKILL)}
            assert not failed or len(self.workplace.metrics()) >= count, failed
            return len(self.workplace.metrics()) >= count

        wait_until(are_done, f"{count} steps")

    def finish(self, **codes: int) -> None:
        """Wait for programs to end with these exit codes; nothing of the run is left, nothing lost or repeated."""
        for name, code in codes.items():
            assert self.programs[name].wait(HANG_S) == code, self.said(name)
        assert self.left() == []
        assert self.workplace.areal("audit", "run").code == 0

    def left(self) -> list[int]:
        """Processes of the run's attempts."""
        tokens = {path.read_text() for path in self.run.glob("attempts/*/token")}
        return [pid for token in tokens for pid in processes_with("AREAL_TOKEN", token)]


@pytest.fixture
def group(workplace: Workplace) -> Iterator[Group]:
    """Programs that do not outlive the test."""
    group = Group(workplace)
    yield group
    for program in group.programs.values():
        with suppress(ProcessLookupError):
            program.kill()
        program.wait()


RUN = ("run", "run.yaml", "run_dir=run", "launcher.type=external", "launcher.nodes=2", "launcher.trainer_processes=2")
HERE = "launcher.host=127.0.0.1"


@pytest.mark.nightly
def test_three_nodes_of_torchrun_with_two_processes_each(group: Group) -> None:
    port, torchrun = free_port(), (sys.executable, "-m", "torch.distributed.run")
    for number in range(3):
        spread = ("--nnodes=3", f"--node-rank={number}", "--nproc-per-node=2", f"--master-port={port}")
        words = ("node", "run", "--config", "run.yaml", "launcher.trainer_processes=3", HERE)
        group.start(f"torchrun-{number}", *torchrun, *spread, "--master-addr=127.0.0.1", "-m", "areal_core", *words)
    group.finish(**{f"torchrun-{number}": 0 for number in range(3)})
    assert [line["step"] for line in group.workplace.metrics()] == [1, 2, 3, 4]
    words = "".join(group.said(f"torchrun-{number}") for number in range(3))
    assert words.count(f"this machine has joined the run in {group.run}, attempt 1") == 3
    assert words.count("local rank 1 ends: local rank 0 serves this machine") == 3
    for rank in range(3):
        log = (group.run / "logs" / f"trainer-{rank}.log").read_text()
        assert "Traceback" not in log


@pytest.mark.nightly
def test_a_node_that_is_killed_and_joined_again_and_a_driver_that_is_killed_and_resumed(group: Group) -> None:
    """The run ends with exit code 0 in all programs that were not killed."""
    for name in ("first", "second"):
        group.areal(name, "node", "run")
    owner = group.areal("owner", *RUN, HERE, "steps=400", "checkpoint.every=2")
    group.wait_for_steps(3)
    kill_tree(group.programs["second"].pid)
    wait_until(lambda: "going back to the last checkpoint (1 of at most 2 times" in group.said("owner"), "the loss")
    status = group.workplace.areal("status", "run")
    assert status.out.split()[0] in ("running", "recovering")
    group.areal("third", "node", "run")
    wait_until(lambda: "attempt 2" in group.said("third"), "the new node has come")
    assert "attempt 2" not in group.said("first"), "the same driver keeps the connection of the other node"
    group.wait_for_steps(len(group.workplace.metrics()) + 2)
    owner.kill()
    owner.wait()
    wait_until(lambda: group.left() == [], "the nodes have ended everything")
    assert group.programs["first"].poll() is None
    done = len(group.workplace.metrics())
    group.areal("owner", "run", "--resume", "run", f"steps={done + 3}")
    group.finish(owner=0, first=0, third=0)
    assert [line["step"] for line in group.workplace.metrics()] == list(range(1, done + 4))
    assert "attempt 3" in group.said("first")


@pytest.mark.nightly
def test_a_run_that_is_stopped_ends_its_nodes_with_its_exit_code(group: Group) -> None:
    group.areal("first", "node", "run")
    group.areal("owner", *RUN, HERE, "steps=400")
    group.areal("second", "node", "run")
    group.wait_for_steps(2)
    group.programs["second"].send_signal(signal.SIGTERM)  # its scheduler takes the node away
    group.finish(owner=143, first=143, second=143)
    assert "was sent SIGTERM" in group.said("owner")
    assert "stopped after a checkpoint" in group.said("owner")


@pytest.mark.nightly
def test_a_scheduler_that_starts_everything_again_goes_on_with_the_run(group: Group, tmp_path: Path) -> None:
    """As Kubernetes does with the pods of an indexed job, whose environment names only the number of the pod."""
    words = ("node", "run", "--config", "run.yaml", "launcher.nodes=2", "launcher.trainer_processes=2", HERE)

    def start(turn: str) -> dict[str, int]:
        for index in range(2):
            command = (*group.workplace.command, *words, "steps=12", "checkpoint.every=1")
            group.start(f"pod-{index}-{turn}", *command, JOB_COMPLETION_INDEX=str(index))
        return {f"pod-{index}-{turn}": 0 for index in range(2)}

    start("first")
    group.wait_for_steps(2)
    for program in group.programs.values():
        program.kill()
        program.wait()
    wait_until(lambda: group.left() == [], "nothing is left")
    group.programs.clear()
    group.finish(**start("second"))
    assert "the driver resumes the run with its own config" in group.said("pod-0-second")
    assert [line["step"] for line in group.workplace.metrics()] == list(range(1, 13))
    assert os.listdir(tmp_path / "run" / "attempts") != ["1"]  # noqa: PTH208


@pytest.mark.nightly
def test_the_script_of_the_examples(group: Group) -> None:
    """As in examples/clusters, with the port of the test."""
    environment = {"MASTER_PORT": str(free_port()), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for number in range(2):
        words = (str(CLUSTERS / "torchrun.sh"), "2", str(number), "127.0.0.1", "run", HERE, "steps=2")
        group.start(f"node-{number}", *words, "launcher.trainer_processes=2", **environment)
    group.finish(**{"node-0": 0, "node-1": 0})
    assert [line["step"] for line in group.workplace.metrics()] == [1, 2]


def test_the_manifest_of_the_examples_is_a_run_with_as_many_nodes_as_pods(group: Group) -> None:
    """Read as YAML; its command is one that areal takes, and its GPUs are those of its nodes."""
    manifest = yaml.safe_load((CLUSTERS / "kubernetes.yaml").read_text())
    job, (container,) = manifest["spec"], manifest["spec"]["template"]["spec"]["containers"]
    assert (manifest["kind"], job["completionMode"]) == ("Job", "Indexed")
    command = [*container["command"], *container["args"]]
    words = build_parser().parse_intermixed_args(command[2:])
    assert command[:2] == ["areal", "node"]
    values = dict(word.split("=", 1) for word in words.overrides)
    assert int(values["launcher.nodes"]) == job["completions"] == job["parallelism"]
    layout = Layout.parse(values["placement"])
    gpus = layout.trainer_gpus + layout.tensor_parallel * layout.servers
    assert gpus == job["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in job["template"]["spec"]["volumes"]}
    assert str(words.run_dir).startswith(mounted["runs"])
    assert words.config.startswith(mounted["config"])
    checked = group.workplace.areal("config", "check", "run.yaml", "launcher.type=external", *words.overrides)
    assert "launcher" not in checked.err, checked.err
