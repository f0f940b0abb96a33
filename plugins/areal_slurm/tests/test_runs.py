"""True runs on a true SLURM: whole, with a process killed, with a node lost, with the driver killed, and in turns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config import load_run
from areal_core.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

CONFIG = """\
plugins: [grpo, hf, fsdp]
steps: 5
deterministic: true
model: {path: model}
dataset: grpo/additions
workflow: single_turn
rewards: [grpo/right_result, "parts.py:digits"]
sampling: {max_new_tokens: 8}
rollout: {batch_size: 4, group_size: 4, max_staleness: 0, stall_timeout_s: 600}
inference_engine: {type: hf, max_concurrent_requests: 16}
train_engine: {type: fsdp, learning_rate: 1e-2}
algorithm: grpo
checkpoint: {every: 1}
launcher: {type: slurm, trainer_processes: 2}
"""
PARTS = """\
import os, sys, time

def digits(completion):
    time.sleep(float(os.environ.get("TEST_SLOWNESS_S", "0")))
    with open(f"{os.environ['TEST_FOLDER']}/places", "a") as file:
        print(os.environ.get("SLURMD_NODENAME"), sys.executable, os.environ.get("TEST_WRAPPED"), file=file)
    return sum(character.isdigit() for character in completion) / 8
"""
MODEL = """\
from pathlib import Path
from areal_grpo.demonstration.model import make_model
make_model(Path("model"), hidden=32, layers=1, heads=2)
"""


class Workplace:
    """A folder with a tiny model and a config, and the cluster that runs it."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run = folder / "run"
        self.log = self.run / "slurm.log"
        (folder / "run.yaml").write_text(CONFIG)
        (folder / "parts.py").write_text(PARTS)
        cluster.environment["TEST_FOLDER"] = str(folder)
        subprocess.run([sys.executable, "-c", MODEL], cwd=folder, env=cluster.environment, check=True)

    def submit(self, *words: str) -> str:
        """Submit the run; the number of its job."""
        said = self.cluster.areal("slurm", "submit", "run.yaml", "run_dir=run", *words, folder=self.folder)
        return re.search(r"^job +(\d+)$", said, re.MULTILINE)[1]  # type: ignore[index]

    def resume(self, *words: str) -> str:
        """Submit a job that goes on with the run."""
        said = self.cluster.areal("slurm", "submit", "--resume", "run", *words, folder=self.folder)
        return re.search(r"^job +(\d+)$", said, re.MULTILINE)[1]  # type: ignore[index]

    def finish(self, job: str, seconds: float = 800) -> str:
        """Wait for the job to complete; what it wrote."""
        self.cluster.wait_for_job(job, ["COMPLETED"], self.log, seconds)
        return self.log.read_text()

    def steps(self, run: str = "run") -> list[int]:
        """The steps that metrics tell of."""
        return [line["step"] for line in RunFolder(self.folder / run).read_metrics()]

    def checkpoints(self) -> list[Path]:
        """Those of the run, which are written beside training."""
        return list(RunFolder(self.run).checkpoints())

    def weights(self, run: str = "run") -> bytes:
        """The exported parameters of a run."""
        return (self.folder / run / "model" / "model.safetensors").read_bytes()

    def processes(self, name: str = "") -> list[int]:
        """What runs anywhere of the run: its driver, members and their guards; or the members of a name alone."""
        found = dict(_processes(self.run))
        if not name:
            return list(found)
        return [pid for pid, known in found.items() if known == name and found.get(_parent(pid)) == name]

    def driver(self) -> list[int]:
        """The process that the batch script has become."""
        return [pid for pid, known in _processes(self.run) if known == "driver"]

    def audit(self) -> None:
        """Nothing is lost, and nothing was trained on twice."""
        assert not json.loads(self.cluster.areal("audit", "run", "--json", folder=self.folder))["problems"]


def _processes(run: Path) -> list[tuple[int, str]]:
    """Processes of a run in any namespace, each with its name in the run; a guard has that of its member."""
    tokens = {path.read_text() for path in run.glob("attempts/*/token")}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        variables = dict(line.partition("=")[::2] for line in environment)
        if f"--resume {run}" in command:
            found.append((int(path.name), "driver"))
        elif variables.get("AREAL_TOKEN", "-") in tokens:
            places = json.loads(variables.get("AREAL_PLACES", '[[0, "srun"]]'))
            task = int(variables.get("SLURM_PROCID", "0")) if len(places) > 1 else 0
            found.append((int(path.name), "srun" if command.startswith("srun") else places[task][1]))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def workplace(cluster: Any, tmp_path: Path) -> Workplace:
    """A place to submit runs from."""
    return Workplace(cluster, tmp_path)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """Waits until something is so."""
    import time

    def wait(condition: Callable[[], object], what: str, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
            time.sleep(0.05)

    return wait


def test_a_run_on_three_nodes(workplace: Workplace) -> None:
    log = workplace.finish(workplace.submit("--nodes=3", "--gres=gpu:2"))
    assert workplace.steps() == [1, 2, 3, 4, 5], log
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_a_process_that_is_killed_costs_what_came_after_the_last_checkpoint(
    workplace: Workplace, wait_for: Callable[..., None]
) -> None:
    job = workplace.submit("--nodes=3", "--gres=gpu:2", "steps=12")
    wait_for(lambda: 3 in workplace.steps() and any(workplace.checkpoints()), "three steps and a checkpoint")
    os.kill(workplace.processes("trainer-1")[0], signal.SIGKILL)
    log = workplace.finish(job)
    assert "was killed by SIGKILL" in log
    assert "going back to the last checkpoint (1 of at most 2 times without a new one)" in log
    assert "(2 of" not in log
    assert workplace.steps() == list(range(1, 13))
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_a_lost_node_is_done_without(workplace: Workplace, cluster: Any, wait_for: Callable[..., None]) -> None:
    slowly = "launcher.setup=export TEST_SLOWNESS_S=0.1"  # a run that is over before the fault would show nothing
    job = workplace.submit("--nodes=3", "--gres=gpu:2", "steps=12", "launcher.trainer_processes=3", slowly)
    wait_for(lambda: 3 in workplace.steps() and any(workplace.checkpoints()), "three steps and a checkpoint")
    cluster.kill("n3")
    log = workplace.finish(job)
    assert "on n3 was lost" in log
    assert "going back to the last checkpoint (1 of at most 2 times without a new one)" in log
    assert "(2 of" not in log
    assert "a call blocks everything" not in log
    assert workplace.steps() == list(range(1, 13))
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_nothing_is_left_of_a_driver_that_is_killed_and_the_run_goes_on(
    workplace: Workplace, cluster: Any, wait_for: Callable[..., None]
) -> None:
    job = workplace.submit("--nodes=2", "steps=12")
    wait_for(lambda: 2 in workplace.steps(), "two steps")
    os.kill(workplace.driver()[0], signal.SIGKILL)
    wait_for(lambda: not workplace.processes(), "the end of all processes", 60)
    cluster.wait_for_job(job, ["FAILED"], workplace.log)
    log = workplace.finish(workplace.resume("--nodes=2"))
    assert workplace.steps() == list(range(1, 13)), log
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_a_time_limit_shorter_than_the_run_changes_no_bit_of_it(
    workplace: Workplace, cluster: Any, wait_for: Callable[..., None]
) -> None:
    workplace.finish(workplace.submit("--nodes=2", "steps=16"))
    workplace.run.rename(workplace.folder / "whole")
    slowly = "launcher.setup=export TEST_SLOWNESS_S=0.3"
    job = workplace.submit("--nodes=2", "steps=16", "--time=60", "--warn=120", slowly)
    wait_for(lambda: 2 in workplace.steps(), "two steps")
    ran_min = int(cluster.job(job)["RunTime"].split(":")[1])
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={ran_min + 2}")  # to come within the warning
    cluster.wait_for_job(job, ["PENDING"], workplace.log)
    assert not workplace.processes()
    assert 2 <= max(workplace.steps()) < 16
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    log = workplace.finish(job)
    assert cluster.job(job)["Restarts"] == "1"
    assert f"the job {job} is requeued and resumes after step " in log
    assert workplace.steps() == list(range(1, 17))
    assert workplace.weights() == workplace.weights("whole")
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_who_stops_a_run_by_hand_wants_it_to_stop(
    workplace: Workplace, cluster: Any, wait_for: Callable[..., None]
) -> None:
    job = workplace.submit("--nodes=2", "steps=500")
    wait_for(lambda: 2 in workplace.steps(), "two steps")
    cluster.run("scancel", "--batch", "--signal=INT", job)
    cluster.wait_for_job(job, ["FAILED"], workplace.log)  # SLURM calls so whatever ends with another code than 0
    assert cluster.job(job)["ExitCode"] == "130:0"
    assert "stopped after a checkpoint" in workplace.log.read_text()
    assert not workplace.processes()


@pytest.mark.nightly
def test_a_preempted_job_comes_again(workplace: Workplace, cluster: Any, wait_for: Callable[..., None]) -> None:
    slowly = "launcher.setup=export TEST_SLOWNESS_S=0.2"
    job = workplace.submit("--nodes=3", "steps=12", "--sbatch=--exclusive", slowly)
    wait_for(lambda: 2 in workplace.steps(), "two steps")
    said = cluster.run(
        "sbatch", "--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1"
    )
    cluster.wait_for_job(job, ["PENDING"], workplace.log)
    cluster.wait_for_job(said.split()[-1], ["COMPLETED"], workplace.log)
    log = workplace.finish(job)
    assert "was sent SIGTERM" in log
    assert f"the job {job} is requeued and resumes after step " in log
    assert workplace.steps() == list(range(1, 13))
    workplace.audit()
    assert not workplace.processes()


@pytest.mark.nightly
def test_the_runs_of_an_array_differ_in_their_seeds(workplace: Workplace, cluster: Any) -> None:
    job = workplace.submit("--array=3,5", "steps=2")
    for number in (3, 5):
        folder = workplace.run / f"task-{number}"
        cluster.wait_for_job(f"{job}_{number}", ["COMPLETED"], folder / "slurm.log")
        assert load_run(folder).config.seed == number
        assert workplace.steps(f"run/task-{number}") == [1, 2]
    assert workplace.weights("run/task-3") != workplace.weights("run/task-5")


@pytest.mark.nightly
def test_nodes_of_a_heterogeneous_job_with_a_wrapper_and_a_python_of_their_own(workplace: Workplace) -> None:
    (workplace.folder / "environment").symlink_to(sys.prefix)
    python = workplace.folder / "environment" / "bin" / Path(sys.executable).name
    second = ("--sbatch=hetjob", "--sbatch=--nodes=2", "--sbatch=--gres=gpu:1")
    settings = ("launcher.exclude=[n1]", "launcher.wrapper=[env, TEST_WRAPPED=yes]", f"launcher.python={python}")
    workplace.finish(workplace.submit("--gres=gpu:2", *second, *settings, "steps=2"))
    assert workplace.steps() == [1, 2]
    places = {tuple(line.split()) for line in (workplace.folder / "places").read_text().splitlines()}
    assert places == {("n2", str(python), "yes")}


@pytest.mark.nightly
def test_a_setup_that_fails_is_told_with_its_words(workplace: Workplace, cluster: Any) -> None:
    fails = "launcher.setup=test -z $SLURM_STEP_NODELIST || { echo no module cuda; exit 7; }"  # not in the batch script
    job = workplace.submit("--nodes=2", "steps=2", fails)
    cluster.wait_for_job(job, ["FAILED"], workplace.log)
    log = workplace.log.read_text()
    assert "srun ended with exit code 7" in log
    assert "no module cuda" in log
    assert not workplace.processes()


@pytest.mark.nightly
def test_a_turn_without_progress_is_not_repeated(
    workplace: Workplace, cluster: Any, wait_for: Callable[..., None]
) -> None:
    job = workplace.submit("--time=60", "--warn=120", "launcher.setup=export TEST_SLOWNESS_S=60")
    wait_for(lambda: workplace.processes("trainer-0"), "a trainer")
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(cluster.job(job)['RunTime'].split(':')[1]) + 2}")
    cluster.wait_for_job(job, ["FAILED"], workplace.log)
    log = workplace.log.read_text()
    assert f"no step was committed within the time limit of the job {job}" in log
    assert "so the job is not requeued; use a longer one: resume with: areal slurm submit --resume" in log
    assert not workplace.processes()


@pytest.mark.nightly
@pytest.mark.parametrize("is_reported", [False, True])
def test_a_lost_node_of_the_driver_begins_the_job_again(
    workplace: Workplace, cluster: Any, wait_for: Callable[..., None], is_reported: bool
) -> None:
    job = workplace.submit("--nodes=2", "steps=12", "launcher.setup=export TEST_SLOWNESS_S=0.2")
    wait_for(lambda: 2 in workplace.steps(), "two steps")
    host = cluster.job(job)["BatchHost"]
    if is_reported:  # connections break, as when a machine begins anew
        cluster.kill(host)
    else:  # as when the power fails
        cluster.signal(host, signal.SIGSTOP)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "the job to be queued again by the other node")
    if not is_reported:
        cluster.kill(host)
    log = workplace.finish(job)
    assert "the job was requeued; start 2 resumes after step " in log
    assert cluster.job(job)["BatchHost"] != host
    assert workplace.steps() == list(range(1, 13))
    workplace.audit()
    assert not workplace.processes()
