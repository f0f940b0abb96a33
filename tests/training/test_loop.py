"""The training loop alone: its calls in their order, and what a stopped run leaves."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.config.sections import CheckpointSection, EvaluationSection, TrainingSection
from areal_core.data import Metric
from areal_core.data.digest import chain_digests
from areal_core.disk import DiskError, tree_size
from areal_core.errors import RunError
from areal_core.runtime.rpc import PeerClosed
from areal_core.training.checkpoint import restore_checkpoint
from areal_core.training.source import Interrupted
from areal_core.training.state import TrainerState
from tests.training.loop_parts import NEEDS_FOLDER, Parts, config, metrics, train

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_step_waits_learns_and_syncs(tmp_path: Path) -> None:
    parts = Parts()
    assert train(tmp_path, parts, config(2))
    assert parts.asked == [
        "begin 0 after 0", "batch 0", "prepare for 1", "sync 1", "batch 1", "prepare for 1", "sync 2",
        "export model",
    ]  # fmt: skip
    assert parts.trained == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts.committed == [(2, "step-000002")]
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["train/tokens"] == 32
    assert lines[0]["train/longest"] == 4
    assert lines[0]["version"] == 101
    assert {"time/wait_s", "time/train_s", "time/weight_sync_s", "time/step_s", "reward/mean"} <= lines[0].keys()


def test_servers_that_need_a_folder_get_it_while_the_trainer_waits(tmp_path: Path) -> None:
    class Needs(Parts):
        def next_batch(self, step: int) -> bytes:
            return NEEDS_FOLDER if self.asked[-1] == "sync 1" else super().next_batch(step)

    parts = Needs()
    assert train(tmp_path, parts, config(2))
    assert parts.asked[3:6] == ["sync 1", "offer folder", "batch 1"]
    assert parts.trained == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_updates_share_a_batch_by_whole_groups(tmp_path: Path) -> None:
    """Each epoch over the batch has each group once, in another order. Means are means over updates."""
    parts = Parts()
    settings = config(1, training=TrainingSection(num_minibatches=2, num_epochs=3))
    train(tmp_path, parts, settings)
    assert "prepare for 6" in parts.asked
    assert len(parts.trained) == 6
    for epoch in range(3):
        pair = parts.trained[2 * epoch : 2 * epoch + 2]
        assert sorted(pair[0] + pair[1]) == [0, 1, 2, 3]
        assert len(pair[0]) == 2
    assert len({tuple(part) for part in parts.trained}) > 2
    line = metrics(tmp_path)[0]
    assert line["train/loss"] == pytest.approx(3.5), "the mean of 1 to 6"
    assert line["train/tokens"] == 3 * 32, "a sum over updates"


def test_an_interruption_leaves_a_committed_checkpoint_that_goes_on(tmp_path: Path) -> None:
    parts = Parts(interrupt_at=2)
    assert not train(tmp_path, parts, config(5))
    assert parts.committed == [(2, "step-000002")]
    assert "export model" not in parts.asked
    again = Parts()
    engines: Any = {"actor": again}
    state = restore_checkpoint(tmp_path / "attempts/1/checkpoints/step-000002", engines)
    assert again.asked == ["load 2"]
    assert [[number for number, _ in step] for step in state.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert train(tmp_path, again, config(3), state)
    assert again.trained == [[8, 9, 10, 11]]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000003"
    fields = json.loads((checkpoint / "trainer.json").read_text())
    assert len(fields["steps"]) == 3
    (part,) = (checkpoint / "actor").iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"the checkpoint is damaged: .* bytes and has "):
        restore_checkpoint(checkpoint, engines)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["actor/parameters", "algorithm.safetensors", "trainer.json"])
def test_a_flipped_bit_is_refused_with_the_way_to_an_older_checkpoint(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    train(run, Parts(), config(2, checkpoint=CheckpointSection(every=1)))
    first, last = (run / f"attempts/1/checkpoints/step-00000{step}" for step in (1, 2))
    flip_a_bit(last / name)
    again: Any = Parts()
    with pytest.raises(RunError, match="the checkpoint is damaged: ") as raised:
        restore_checkpoint(last, {"actor": again})
    assert str(last / name) in raised.value.message
    assert again.asked == [], "nothing was loaded"
    (hint,) = raised.value.hints
    assert f"{first};" in hint
    assert hint.endswith(f"mv {last} {run}/damaged-step-000002 && areal run --resume {run}")
    shutil.rmtree(first)
    with pytest.raises(RunError) as raised:
        restore_checkpoint(last, {"actor": again})
    assert "no older checkpoint is kept" in raised.value.hints[0]


def test_a_checkpoint_without_its_state_is_refused_in_a_sentence(tmp_path: Path) -> None:
    train(tmp_path, Parts(), config(1))
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000001"
    path = checkpoint / "trainer.json"
    engines: Any = {"actor": Parts()}
    for text in ("{}", "[]", "", "not JSON"):
        path.write_text(text)
        with pytest.raises(RunError, match=f"damaged: {path} cannot be read or is of another version: "):
            restore_checkpoint(checkpoint, engines)
    path.unlink()
    with pytest.raises(RunError, match=f"damaged: {path} cannot be read: No such file"):
        restore_checkpoint(checkpoint, engines)
    shutil.rmtree(checkpoint)
    with pytest.raises(RunError, match=f"damaged: {path} cannot be read: No such file") as raised:
        restore_checkpoint(checkpoint, engines)
    assert raised.value.hints[0].startswith("restore the folder: the ledger knows of no older checkpoint")


def test_an_older_checkpoint_has_no_digests_and_is_loaded(tmp_path: Path) -> None:
    train(tmp_path, Parts(), config(1))
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000001"
    state = json.loads((checkpoint / "trainer.json").read_text())
    del state["digest"], state["digests"]
    (checkpoint / "trainer.json").write_text(json.dumps(state))
    engines: Any = {"actor": Parts()}
    restore_checkpoint(checkpoint, engines)
    assert engines["actor"].asked == ["load 1"]


def test_what_the_trainer_saw_does_not_grow_with_the_run(tmp_path: Path) -> None:
    train(tmp_path, Parts(), config(4, checkpoint=CheckpointSection(every=1, keep=4)))
    states = [
        json.loads((tmp_path / f"attempts/1/checkpoints/step-{step:06d}/trainer.json").read_text())
        for step in range(1, 5)
    ]
    assert [(state["first"], len(state["steps"])) for state in states] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    before = ""
    for state in states:
        assert state["before"] == before
        before = chain_digests(before, [(number, digest) for number, digest in state["steps"][0]])


class Failing(Parts):
    """A source that fails at one step."""

    def __init__(self, error: Exception, at: int) -> None:
        super().__init__()
        self._error, self._at = error, at

    def next_batch(self, step: int) -> bytes:
        if step == self._at:
            raise self._error
        return super().next_batch(step)


def test_rollouts_that_fail_leave_a_checkpoint_and_their_words(tmp_path: Path) -> None:
    parts = Failing(RunError("16 prompt groups failed one after another"), 2)
    with pytest.raises(RunError, match="16 prompt groups failed"):
        train(tmp_path, parts, config(5))
    assert parts.committed == [(2, "step-000002")]


@pytest.mark.parametrize("error", [PeerClosed("the rollout controller has died"), DiskError("the disk is full")])
def test_nothing_is_committed_where_nobody_can_commit(tmp_path: Path, error: RunError) -> None:
    parts = Failing(error, 2)
    with pytest.raises(type(error)):
        train(tmp_path, parts, config(5))
    assert parts.committed == []


@pytest.mark.parametrize("error", [Interrupted(), RunError("the engine is lost")])
def test_what_ends_an_evaluation_leaves_a_checkpoint(tmp_path: Path, error: Exception) -> None:
    class Ends(Parts):
        def end_evaluation(self, patience_s: float) -> dict[str, float]:
            raise error

    parts = Ends()
    section = EvaluationSection.model_construct(every=2, at_start=False, keep_best=True)
    settings = config(5, evaluation=section, evaluates_beside_training=False)
    if isinstance(error, RunError):
        with pytest.raises(RunError, match="the engine is lost"):
            train(tmp_path, parts, settings)
    else:
        assert not train(tmp_path, parts, settings)
    assert parts.committed == [(2, "step-000002")]
    assert [line["step"] for line in metrics(tmp_path)] == [1], "the step is not over before it is evaluated"
    again: Any = Parts()
    again.scores = [0.5, 0.75]
    state = restore_checkpoint(tmp_path / "attempts/1/checkpoints/step-000002", {"actor": again})
    assert train(tmp_path, again, config(4, evaluation=section), state)
    found = [(line["step"], line.get("evaluation/reward")) for line in metrics(tmp_path)]
    assert found == [(1, None), (2, 0.5), (3, None), (4, 0.75)]
    assert metrics(tmp_path)[1]["train/tokens"] == 32, "what it had measured before was kept"


@pytest.mark.parametrize("beside", [False, True])
def test_a_best_model_that_cannot_be_exported_costs_nothing_that_was_trained(tmp_path: Path, beside: bool) -> None:
    class Refuses(Parts):
        def export(self, folder: Path) -> None:
            raise RunError("exporting the model failed: the tokenizer cannot be saved")

    section = EvaluationSection.model_construct(every=2, at_start=False, keep_best=True)
    settings = config(5, evaluation=section, evaluates_beside_training=beside)
    parts = Refuses(score=0.5)
    with pytest.raises(RunError, match="the tokenizer cannot be saved"):
        train(tmp_path, parts, settings)
    assert parts.committed == [(2, "step-000002")]
    again: Any = Parts(score=0.5)
    state = restore_checkpoint(tmp_path / "attempts/1/checkpoints/step-000002", {"actor": again})
    assert train(tmp_path, again, settings, state)
    assert json.loads((tmp_path / "best/evaluation.json").read_text())["step"] == 2, "the resume writes it"


def test_checkpoints_come_by_time_too_and_take_a_bounded_share_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes 10 s and a checkpoint 4 s by this clock."""
    now = [0.0]
    monkeypatch.setattr("areal_core.training.checkpointer.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Timed(Parts):
        def next_batch(self, step: int) -> bytes:
            now[0] += 10
            return super().next_batch(step)

        def save(self, folder: Path) -> None:
            now[0] += 4
            super().save(folder)

    often = Timed()
    train(tmp_path / "often", often, config(8, checkpoint=CheckpointSection(every_s=20, largest_share=0.5)))
    assert [step for step, _ in often.committed] == [2, 4, 6, 8]
    seldom = Timed()
    train(tmp_path / "seldom", seldom, config(14, checkpoint=CheckpointSection(every_s=20, largest_share=0.05)))
    assert [step for step, _ in seldom.committed] == [2, 10, 14], "4 s of 80 s are a twentieth"
    never = Timed()
    train(tmp_path / "never", never, config(8, checkpoint=CheckpointSection(every_s=0)))
    assert [step for step, _ in never.committed] == [8]


def test_a_resume_does_not_forget_the_best_score(tmp_path: Path) -> None:
    """The best model was written after the checkpoint from which the run resumes."""
    section = EvaluationSection.model_construct(every=1, at_start=False, keep_best=True)
    parts = Parts()
    parts.scores = [0.2, 0.9]
    train(tmp_path, parts, config(2, evaluation=section))
    again = Parts(score=0.5)
    train(tmp_path, again, config(3, evaluation=section), TrainerState(step=1, best=0.2))
    assert (tmp_path / "best/weights").read_text() == "2"
    assert json.loads((tmp_path / "best/evaluation.json").read_text()) == {"step": 2, "evaluation/reward": 0.9}


def test_checkpoints_are_kept_by_count_and_the_committed_one_always(tmp_path: Path) -> None:
    parts = Parts()
    train(tmp_path, parts, config(5, checkpoint=CheckpointSection(every=1, keep=2)))
    assert [step for step, _ in parts.committed] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "attempts/1/checkpoints").iterdir()) == [
        "step-000004",
        "step-000005",
    ]


def test_evaluation_comes_when_it_is_due_and_keeps_the_best(tmp_path: Path) -> None:
    parts = Parts()
    parts.scores = [0.1, 0.4, 0.3]
    section = EvaluationSection.model_construct(every=2, at_start=True, keep_best=True)
    train(tmp_path, parts, config(3, evaluation=section))
    assert Counter(parts.asked)["evaluate"] == 3, "at the start, after step 2, and at the end"
    assert parts.asked.index("synced") < parts.asked.index("evaluate"), "of the synced weights"
    assert json.loads((tmp_path / "best/evaluation.json").read_text())["step"] == 2, "0.3 is less than 0.4"
    assert parts.asked.index("export best") > parts.asked.index("sync 2"), "the start is not a model of this run"
    assert [line.get("evaluation/reward") for line in metrics(tmp_path)] == [0.1, None, 0.4, 0.3]


def test_engines_give_their_memory_away_where_they_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    parts = Parts()
    train(tmp_path, parts, config(1, takes_turns=True))
    order = [word for word in parts.asked if word in ("batch 0", "release memory", "prepare for 1", "sync 1")]
    assert order == ["batch 0", "release memory", "prepare for 1", "sync 1"]


def test_gradients_that_stay_without_end_end_the_run(tmp_path: Path) -> None:
    parts = Parts(skip=True)
    with pytest.raises(RunError, match=r"not finite in 3 updates in a row \(step 2\)"):
        train(tmp_path, parts, config(5))


def test_a_loss_that_is_nan_is_called_that(tmp_path: Path) -> None:
    class Wrong(Parts):
        def train(self, works: Any) -> dict[str, Metric]:
            return {**super().train(works), "loss": Metric.mean(math.nan)}

    with pytest.raises(RunError, match=r"the loss \(nan\) of actor was not finite in 3 updates in a row"):
        train(tmp_path, Wrong(skip=True), config(5))


def test_a_checkpoint_waits_for_as_much_room_as_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def require_room(what: str, folder: Path, size: int) -> None:
        if what == "a checkpoint":
            asked.append(size)
            if len(asked) == 2:
                raise DiskError("no room")

    monkeypatch.setattr("areal_core.disk.require_room", require_room)
    parts = Parts()
    assert train(tmp_path, parts, config(2, checkpoint=CheckpointSection(every=1)))
    assert parts.committed == [(1, "step-000001"), (2, "step-000002")]
    assert len(asked) == 3
    assert asked[0] == 0
    assert asked[1] == asked[2] == tree_size(tmp_path / "attempts/1/checkpoints/step-000001")
