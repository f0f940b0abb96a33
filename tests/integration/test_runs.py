"""Runs from start to end, interrupted, killed, resumed, on one rank and on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)
"""Cases that say little more than their siblings do."""
HANG_S = 300
"""Nothing here takes half a minute on a quiet machine; what takes five hangs."""


def processes_of(folder: object) -> list[str]:
    """Processes whose command line names the folder."""
    done = subprocess.run(["pgrep", "-fa", str(folder)], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "pgrep" not in line]


def test_a_run_leaves_what_it_promises(workplace: Workplace) -> None:
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "training.num_minibatches=2", "checkpoint.every=2",
        "evaluation.dataset.type=grpo/additions", "evaluation.limit=10", "evaluation.every=2",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = workplace.metrics()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {"evaluation/reward", "evaluation/response_length"} <= lines[0].keys()
    assert {"reward/mean", "reward/right_result", "staleness/mean", "train/entropy", "train/behavior_kl",
            "train/clip_fraction", "time/wait_s", "time/train_s", "time/weight_sync_s"} <= lines[1].keys()  # fmt: skip
    assert max(line.get("staleness/max", 0) for line in lines) <= 1
    assert max(line.get("train/clip_fraction", 0) for line in lines) > 0, "two updates a batch must meet the clip"
    run = workplace.folder / "run"
    for name in ("config.yaml", "plugins.json", "report.html", "samples.jsonl", "model/config.json",
                 "model/tokenizer.json", "best/model.safetensors", "logs/controller.log"):  # fmt: skip
        assert (run / name).exists(), name
    assert '"train/loss":[' in (run / "report.html").read_text()
    attempt = run / "attempts" / "1"
    assert sorted(p.name for p in (attempt / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert not processes_of(run)
    audit = workplace.areal("audit", "run", "--json")
    assert audit.code == 0, audit.out
    assert json.loads(audit.out)["committed_step"] == 4
    again = workplace.areal("run", "run.yaml", "run_dir=run")
    assert again.code == 2
    assert "exists already" in again.err


ENGINE = """\
import sys, time, traceback
from areal_testing.conformance.naive import NaiveEngine


class Engine(NaiveEngine):
    async def start(self, model):
        time.sleep(1)
        for frame in sys._current_frames().values():
            assert "load_tokenizer" not in [one.name for one in traceback.extract_stack(frame)]
        await super().start(model)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_no_other_thread_imports_while_an_engine_of_the_process_does(workplace: Workplace) -> None:
    """Two threads that import transformers at once may each find half of it."""
    (workplace.folder / "own.py").write_text(ENGINE)
    words = ["inference_engine.type=own.py:Engine", "run_dir=run", "steps=1", "rollout.max_staleness=0"]
    done = workplace.areal("run", "run.yaml", *words)
    assert done.code == 0, done.err


@pytest.mark.slow
def test_interrupt_then_resume(workplace: Workplace) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=2000")
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    second = workplace.areal("run", "--resume", "run")
    assert second.code == 2
    assert "another process is running" in second.err
    live = workplace.areal("audit", "run", "--json")
    assert live.code == 0, live.out + live.err
    assert json.loads(live.out)["groups"]["consumed"] >= 3 * 4
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    for notice in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
    ):  # they come in twos and threes: no second wish
        process.send_signal(notice)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "areal run --resume" in out
    step = json.loads(workplace.areal("audit", "run", "--json").out)["committed_step"]
    assert step >= 3
    assert not processes_of(workplace.folder / "run")
    refused = workplace.areal("run", "--resume", "run", "train_engine.learning_rate=1")
    assert refused.code == 2
    assert "learning_rate" in refused.err
    done = workplace.areal("run", "--resume", "run", f"steps={step + 2}")
    assert done.code == 0, done.err
    assert [line["step"] for line in workplace.metrics()] == list(range(1, step + 3))
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["trainer-1", NIGHTLY("controller"), NIGHTLY("guard:trainer-0"), NIGHTLY("guard:controller")]
)
def test_a_run_goes_back_to_its_last_checkpoint_by_itself(workplace: Workplace, name: str) -> None:
    """What is killed costs the steps since the last checkpoint, and not the run."""
    process = workplace.start(
        "run", "run.yaml", "run_dir=run", "steps=10", "checkpoint.every=1", "launcher.trainer_processes=2"
    )
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    os.kill(workplace.pid(name), signal.SIGKILL)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "going back to the last checkpoint (1 of at most 2 times without a new one)" in out
    assert "guard" in name or f"{name} on this machine was killed by SIGKILL" in out
    assert [line["step"] for line in workplace.metrics()] == list(range(1, 11))
    assert not processes_of(workplace.folder / "run")
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_a_notice_counts_also_when_something_is_lost_at_the_same_time(workplace: Workplace) -> None:
    process = workplace.start("run", "run.yaml", "run_dir=run", "steps=2000", "checkpoint.every=1")
    checkpoints = workplace.folder / "run/attempts/1/checkpoints"
    workplace.wait_for(lambda: len([*checkpoints.glob("step-*")]) >= 2, process)  # the first is committed
    os.kill(workplace.pid("controller"), signal.SIGKILL)
    time.sleep(0.5)  # it is on its way back
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert "stopped after a checkpoint" in out
    assert not processes_of(workplace.folder / "run")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["guard:trainer-0", "controller", "trainer-0", "server-0", "reward-0", "worker-0"])
def test_the_death_of_any_process_is_told_and_leaves_nothing(workplace: Workplace, name: str) -> None:
    """Of one that may be replaced too, and then the run goes on. On one machine all have one guard."""
    is_replaced = name.startswith(("reward", "worker", "server"))
    steps = 12 if is_replaced else 2000
    changes = (f"steps={steps}", "checkpoint.every=1", "launcher.max_attempts_without_checkpoint=0")
    process = workplace.start("run", "run.yaml", "run_dir=run", *changes)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    os.kill(workplace.pid(name), signal.SIGKILL)
    out, err = process.communicate(timeout=HANG_S)
    assert not processes_of(workplace.folder / "run")
    assert workplace.areal("audit", "run").code == 0
    if is_replaced:
        assert process.returncode == 0, err
        assert "reward" in name or f"{name} was killed by SIGKILL: it is restarted" in out
        assert not (workplace.folder / "run/attempts/2").exists()
        return
    assert process.returncode == 1
    assert "was lost" in err if name.startswith("guard") else f"{name} " in err
    assert "SIGKILL" in err or "was lost" in err
    assert "areal run --resume" in err
    done = workplace.areal("run", "--resume", "run", f"steps={len(workplace.metrics()) + 2}", "--allow-changes")
    assert done.code == 0, done.err
    assert workplace.areal("audit", "run").code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("damage", ["a bit", "zeros", "no state"])
def test_a_damaged_checkpoint_is_refused_and_the_run_goes_back(workplace: Workplace, damage: str) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "checkpoint.every=1", "launcher.trainer_processes=2")
    assert done.code == 0, done.err
    checkpoint = workplace.folder / "run/attempts/1/checkpoints/step-000004"
    path = checkpoint / ("trainer.json" if damage == "no state" else "actor/__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "a bit" else bytes(len(data)))
    if damage == "no state":
        path.unlink()
    refused = workplace.areal("run", "--resume", "run", "steps=6")
    assert refused.code == 1
    assert str(path) in refused.err
    assert "Traceback" not in refused.err
    assert "continue with:" not in refused.err, "it would fail for ever"
    assert workplace.areal("audit", "run").code == 1
    aside, _, resume = refused.err.partition("goes back to the older one: ")[2].splitlines()[0].partition(" && ")
    subprocess.run(aside, shell=True, check=True)
    assert resume == f"areal run --resume {workplace.folder / 'run'}"
    done = workplace.areal(*resume.split()[1:], "steps=6")
    assert done.code == 0, done.err
    assert [line["step"] for line in workplace.metrics()] == [1, 2, 3, 4, 5, 6]
    audit = workplace.areal("audit", "run")
    assert audit.code == 0, audit.out


def test_a_killed_run_resumes_to_the_same_weights(workplace: Workplace) -> None:
    kill_and_resume(workplace, at_steps=(3,), steps=5, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, NIGHTLY(False)])
def test_killed_at_any_moment_nothing_is_lost(workplace: Workplace, deterministic: bool) -> None:
    kill_and_resume(workplace, at_steps=(1, 4, 6), steps=9, deterministic=deterministic)


def kill_and_resume(workplace: Workplace, *, at_steps: tuple[int, ...], steps: int, deterministic: bool) -> None:
    """Kill the driver with SIGKILL at some steps and resume it each time.

    Its children end with it, and the audits are clean. In deterministic mode the weights equal those of a run that
    was never killed.
    """
    words = [f"steps={steps}", "checkpoint.every=2"]
    if deterministic:
        words += ["deterministic=true", "rollout.max_staleness=0"]
    command = ["run", "run.yaml", "run_dir=run", *words]
    for goal in at_steps:
        process = workplace.start(*command)
        workplace.wait_for(lambda goal=goal: len(workplace.metrics()) >= goal, process)
        time.sleep(0.01 * goal)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + HANG_S
        while processes_of(workplace.folder / "run") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of(workplace.folder / "run")
        assert workplace.areal("audit", "run").code == 0
        # The plugins under test are editable installs: somebody may be editing them while this runs.
        command = ["run", "--resume", "run", "--allow-changes"]
    done = workplace.areal(*command)
    assert done.code == 0, done.err
    assert workplace.areal("audit", "run").code == 0
    if deterministic:
        whole = workplace.areal("run", "run.yaml", "run_dir=whole", *words)
        assert whole.code == 0, whole.err
        assert workplace.weights("run") == workplace.weights("whole")


HELD = """\
import time
from pathlib import Path

from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine


class Held(FSDPEngine):
    '''Writes the snapshot of a step once a file named like its checkpoint lies in a folder.'''

    def __init__(self, learning_rate: float, gates: str) -> None:
        super().__init__(FSDPConfig(learning_rate=learning_rate))
        self._gates = Path(gates)

    def snapshot(self):
        write = super().snapshot()

        def held(folder):
            while not (self._gates / folder.parent.name.removeprefix(".").removesuffix(".new")).exists():
                time.sleep(0.01)
            write(folder)

        return held
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, NIGHTLY(2)])
def test_killed_while_a_checkpoint_is_on_its_way(workplace: Workplace, ranks: int) -> None:
    """SIGKILL with steps trained behind a checkpoint that is not whole, then behind one that was committed late: the
    audits are clean, and a resume goes on from the committed one to the parameters of a run that nobody killed."""
    (workplace.folder / "held.py").write_text(HELD)
    (gates := workplace.folder / "gates").mkdir()
    words = ["steps=10", "checkpoint.every=4", "deterministic=true", "rollout.max_staleness=0",
             f"launcher.trainer_processes={ranks}"]  # fmt: skip
    held = ["train_engine.type=held.py:Held", "train_engine.learning_rate=1e-2", f"train_engine.gates={gates}"]
    command = ["run", "run.yaml", "run_dir=run", *words, *held]
    for opened, goal, committed in ((), 6, 0), (("step-000004",), 9, 4):
        process = workplace.start(*command)
        workplace.wait_for(lambda: len(workplace.metrics()) >= 5, process)
        for name in opened:
            (gates / name).touch()
        workplace.wait_for(lambda goal=goal: len(workplace.metrics()) >= goal, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + HANG_S
        while processes_of(workplace.folder / "run") and time.monotonic() < deadline:
            time.sleep(0.05)
        audit = workplace.areal("audit", "run", "--json")
        assert audit.code == 0, audit.out
        assert json.loads(audit.out)["committed_step"] == committed
        command = ["run", "--resume", "run", "--allow-changes"]
    (gates / "step-000008").touch()
    done = workplace.areal(*command)
    assert done.code == 0, done.err
    assert workplace.areal("audit", "run").code == 0
    whole = workplace.areal("run", "run.yaml", "run_dir=whole", *words)
    assert whole.code == 0, whole.err
    assert workplace.weights("run") == workplace.weights("whole")


@pytest.mark.slow
def test_two_ranks_train_like_one(workplace: Workplace) -> None:
    """Deterministic and synchronous, so that both see the same data: two gloo ranks end where one does."""
    words = ["run", "run.yaml", "deterministic=true", "rollout.max_staleness=0", "steps=2"]
    one = workplace.areal(*words, "run_dir=one")
    two = workplace.areal(*words, "run_dir=two", "launcher.trainer_processes=2")
    assert one.code == two.code == 0, one.err + two.err
    for left, right in zip(workplace.metrics("one"), workplace.metrics("two"), strict=True):
        assert left["train/loss"] == pytest.approx(right["train/loss"], abs=1e-5)
        assert left["train/gradient_norm"] == pytest.approx(right["train/gradient_norm"], rel=1e-3)
        assert left["reward/mean"] == right["reward/mean"]
