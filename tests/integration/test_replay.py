"""`areal replay`: a step of a run, computed again from what the run has kept."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow


def replayed(workplace: Workplace, step: int, *changes: str) -> dict:
    done = workplace.areal("replay", "run", "--step", str(step), "--json", *changes)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_steps_of_a_killed_and_resumed_asynchronous_run_are_computed_again(workplace: Workplace) -> None:
    """The trainer is killed between two checkpoints, and the steps since the first one are trained again."""
    words = [
        "steps=9",
        "checkpoint.every=3",
        "checkpoint.keep=4",
        "training.num_minibatches=2",
        "rollout.max_staleness=2",
    ]
    process = workplace.start("run", "run.yaml", "run_dir=run", *words)
    workplace.wait_for(lambda: len(workplace.metrics()) >= 5, process)
    os.kill(workplace.pid("trainer-0"), signal.SIGKILL)
    assert process.wait(600) == 0, process.communicate()
    assert (workplace.folder / "run" / "attempts" / "2").is_dir()
    for step, begin in ((3, 0), (6, 3), (9, 6)):
        found = replayed(workplace, step)
        assert (found["begin"], found["difference"]) == (begin, 0.0)
    (line,) = (line for line in workplace.metrics() if line["step"] == 8)
    found = replayed(workplace, 8)
    assert (found["begin"], found["difference"]) == (6, None), "the run has no checkpoint of this step"
    same = line.keys() & {name for name in found["metrics"] if not name.startswith("engine/")}
    assert {"train/loss", "reward/mean", "staleness/mean"} <= same
    assert {name: found["metrics"][name] for name in same} == {name: line[name] for name in same}
    assert len(found["samples"]) == line["batch/sequences"]


def test_the_samples_add_up_to_the_loss_and_settings_can_be_changed(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2")
    assert done.code == 0, done.err
    found = replayed(workplace, 2)
    samples = found["samples"]
    assert found["difference"] == 0.0
    assert sum(sample["loss"] for sample in samples) == pytest.approx(found["metrics"]["train/loss"], abs=1e-6)
    assert sum(sample["share"] for sample in samples) == pytest.approx(1)
    assert [sample["share"] for sample in samples] == sorted((s["share"] for s in samples), reverse=True)
    for sample in samples:
        assert len(sample["values"]["input_ids"]) == sample["tokens"]
        assert sum(sample["values"]["loss_mask"]) == sample["trained"]
    changed = replayed(workplace, 2, "algorithm.advantage=grpo/group_centered")
    assert changed["difference"] is None
    assert {(s["group"], s["sample"]): s["reward"] for s in changed["samples"]} == {
        (s["group"], s["sample"]): s["reward"] for s in samples
    }
    assert [s["advantage"] for s in changed["samples"]] != [s["advantage"] for s in samples]
    shown = workplace.areal("replay", "run", "--step", "2")
    assert "parameters after the step: at most 0 from those of the run's checkpoint" in shown.out
    page = workplace.areal("view", str(workplace.folder / "run" / "replays" / "step-000002"), "--no-open")
    assert page.code == 0, page.err
    assert workplace.areal("audit", "run").code == 0


def test_steps_whose_trajectories_are_gone_are_refused_unless_all_are_kept(workplace: Workplace) -> None:
    words = ["run.yaml", "steps=4", "checkpoint.every=1", "checkpoint.keep=1"]
    assert workplace.areal("run", *words, "run_dir=run").code == 0
    gone = workplace.areal("replay", "run", "--step", "3")
    assert gone.code == 1
    assert "step 3 cannot be computed again" in gone.err
    assert "checkpoint.keep_trajectories: true keeps those of all steps" in gone.err
    beyond = workplace.areal("replay", "run", "--step", "5")
    assert (beyond.code, "there is no step 5: the run has steps 1 to 4" in beyond.err) == (2, True)
    kept = workplace.areal("run", *words, "checkpoint.keep_trajectories=true", "run_dir=kept")
    assert kept.code == 0, kept.err
    done = workplace.areal("replay", "kept", "--step", "3")
    assert done.code == 0, done.err
    assert "step 3, computed again from the initial model" in done.out


def test_a_run_on_a_data_set_and_a_folder_that_is_no_run_are_refused(workplace: Workplace) -> None:
    (workplace.folder / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    config = "plugins: [fsdp, rewards, finetuning]\nsteps: 1\nmodel: {path: model}\nalgorithm: finetuning/sft\n"
    config += "dataset: {type: rewards/jsonl, paths: [rows.jsonl]}\nrollout: {batch_size: 1}\ntrain_engine: fsdp\n"
    (workplace.folder / "sft.yaml").write_text(config)
    done = workplace.areal("run", "sft.yaml", "run_dir=run")
    assert done.code == 0, done.err
    refused = workplace.areal("replay", "run", "--step", "1")
    assert (refused.code, "the run learns from a data set" in refused.err) == (2, True), refused.err
    refused = workplace.areal("replay", ".", "--step", "1")
    assert (refused.code, "is not a run that was started" in refused.err) == (2, True), refused.err


def test_a_step_of_two_ranks_is_computed_again_by_one_process(workplace: Workplace) -> None:
    words = ["steps=3", "launcher.trainer_processes=2", "train_engine.parallel.data=2", "train_engine.warmup_steps=2"]
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words)
    assert done.code == 0, done.err
    assert replayed(workplace, 3)["difference"] < 1e-4, "two ranks round their sums elsewhere; a step is 1e-2"
    shown = workplace.areal("replay", "run", "--step", "3")
    assert "not what the run computed" not in shown.out


def test_a_step_that_now_has_another_loss_is_said_to_differ(workplace: Workplace) -> None:
    """What the run wrote is changed, because any later change of its code or data would show in the same way."""
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=2")
    assert done.code == 0, done.err
    assert "not what the run computed" not in workplace.areal("replay", "run", "--step", "2").out
    path = workplace.folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["train/gradient_norm"] = line["train/gradient_norm"] * 2 + 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = workplace.areal("replay", "run", "--step", "2")
    assert "not what the run computed: train/gradient_norm is" in shown.out


def test_a_replay_with_changes_has_a_folder_and_a_config_of_its_own(workplace: Workplace) -> None:
    done = workplace.areal("run", "run.yaml", "run_dir=run", "steps=1")
    assert done.code == 0, done.err
    for change in ("algorithm.advantage=grpo/group_centered", "train_engine.learning_rate=1e-3"):
        assert workplace.areal("replay", "run", "--step", "1", change).code == 0
    folders = sorted((workplace.folder / "run" / "replays").iterdir())
    configs = [(folder / "config.yaml").read_text() for folder in folders]
    assert [folder.name[:12] for folder in folders] == ["step-000001-"] * 2
    assert sorted("learning_rate: 0.001" in text for text in configs) == [False, True]
    assert sorted("group_centered" in text for text in configs) == [False, True]
