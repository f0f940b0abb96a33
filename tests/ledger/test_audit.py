"""The ledger held against what the trainer saw: what is changed in either is found."""

from __future__ import annotations

import json
import sqlite3
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.ledger.audit import audit_folder
from areal_core.ledger.store import DATABASE, Ledger
from areal_core.training.state import TrainerState

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_dir(tmp_path: Path, written: Any) -> Path:
    """A run of four steps of one group each: two lie before the last checkpoint but one."""
    ledger = Ledger(tmp_path / "attempts/1/ledger", tmp_path)
    trainer_state = TrainerState(step=4)
    for number in range(4):
        ledger.dispatched(number, number, 0)
        (group,) = written(ledger.folder, [number])
        ledger.ended(group)
        ledger.flush()
        ledger.consumed([number], number)
        trainer_state.steps.append([(number, group.record.digest)])
        if number == 1:
            trainer_state.take_snapshot()
    checkpoint = tmp_path / "attempts/1/checkpoints/step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "actor").mkdir()
    (checkpoint / "actor" / "parameters").write_bytes(bytes(100))
    state = trainer_state.to_json()
    state["files"], state["digests"] = {"actor/parameters": 100}, {"actor/parameters": zlib.crc32(bytes(100))}
    (checkpoint / "trainer.json").write_text(json.dumps(state))
    ledger.commit(4, checkpoint, 4)
    ledger.close()
    return tmp_path


def changed(run_dir: Path, statement: str) -> list[str]:
    """What the audit says of a ledger in which something was changed."""
    folder = run_dir / "attempts/1/ledger"
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute(statement)
    return audit_folder(folder, run_dir).problems


def test_both_sides_agree(run_dir: Path) -> None:
    assert audit_folder(run_dir / "attempts/1/ledger", run_dir).problems == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE groups SET digest = 'another' WHERE number = 0",
        "UPDATE groups SET step = 1, place = 1 WHERE number = 0",
        "UPDATE groups SET state = 'dropped', reason = 'stale' WHERE number = 1",
    ],
)
def test_what_lies_long_ago_is_held_against_one_digest(run_dir: Path, statement: str) -> None:
    problems = changed(run_dir, statement)
    assert problems == ["ledger and trainer disagree on what was trained on in steps 0 to 1"]


def test_of_the_last_steps_the_group_is_told(run_dir: Path) -> None:
    problems = changed(run_dir, "UPDATE groups SET digest = 'another' WHERE number = 3")
    assert problems == ["step 3: trajectories of groups [3] differ from the ledger's"]
    (problem,) = changed(run_dir, "UPDATE groups SET digest = NULL WHERE number = 3")
    assert problem == "step 3: ledger and trainer disagree on which groups were trained on: [3]"


def test_a_group_that_was_trained_on_twice(run_dir: Path) -> None:
    path = run_dir / "attempts/1/checkpoints/step-000004/trainer.json"
    state = json.loads(path.read_text())
    state["steps"][1] += state["steps"][0]
    path.write_text(json.dumps(state))
    problems = audit_folder(run_dir / "attempts/1/ledger", run_dir).problems
    assert "group 2 was trained on 2 times" in problems


@pytest.mark.parametrize(
    "damaged", ["{}", "[]", "", "not JSON", '{"step": 4, "before": "", "first": 0, "steps": 5, "files": {}}']
)
def test_a_damaged_consumption_log_is_a_finding(run_dir: Path, damaged: str) -> None:
    path = run_dir / "attempts/1/checkpoints/step-000004/trainer.json"
    path.write_text(damaged)
    *_, problem = audit_folder(run_dir / "attempts/1/ledger", run_dir).problems
    assert problem.startswith(f"{path} is damaged or of another version: ")


def test_a_checkpoint_that_was_cut_off_is_a_finding(run_dir: Path) -> None:
    path = run_dir / "attempts/1/checkpoints/step-000004/actor/parameters"
    path.write_bytes(bytes(99))
    assert audit_folder(run_dir / "attempts/1/ledger", run_dir).problems == [f"{path} had 100 bytes and has 99"]
    path.unlink()
    assert audit_folder(run_dir / "attempts/1/ledger", run_dir).problems == [f"{path} had 100 bytes and is missing"]


def test_a_checkpoint_with_a_flipped_bit_is_a_finding(run_dir: Path) -> None:
    ledger, checkpoint = run_dir / "attempts/1/ledger", run_dir / "attempts/1/checkpoints/step-000004"
    path = checkpoint / "actor" / "parameters"
    path.write_bytes(bytes(99) + b"\1")
    assert audit_folder(ledger, run_dir).problems == [f"{path} has other contents than were written"]


def test_another_checkpoint_in_its_place_is_a_finding(run_dir: Path) -> None:
    path = run_dir / "attempts/1/checkpoints/step-000004/trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "best": 0.5}))
    told = f"{path.parent} is not the checkpoint that the run committed"
    assert audit_folder(run_dir / "attempts/1/ledger", run_dir).problems == [told]


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE groups SET step = 'late' WHERE number = 1", "groups.step is 'late', which is not an integer"),
        (
            "UPDATE facts SET value = 'all' WHERE name = 'committed_step'",
            "committed_step is 'all', which is not an integer",
        ),
        ("UPDATE groups SET oldest = 7 WHERE number = 2", "groups were sampled by version 7, which was never synced"),
    ],
)
def test_numbers_that_cannot_be_are_findings(run_dir: Path, statement: str, told: str) -> None:
    (problem,) = changed(run_dir, statement)
    assert told in problem


def test_one_of_an_older_version_too(run_dir: Path) -> None:
    path = run_dir / "attempts/1/checkpoints/step-000004/trainer.json"
    path.write_text(json.dumps({"step": 4, "consumption_log": []}))
    *_, problem = audit_folder(run_dir / "attempts/1/ledger", run_dir).problems
    assert problem == f"{path} is damaged or of another version: KeyError: 'first'"


def test_the_ledger_of_fine_tuning_holds_commits_alone_and_the_rows_come_in_their_order(run_dir: Path) -> None:
    ledger, logged = run_dir / "attempts/1/ledger", run_dir / "attempts/1/checkpoints/step-000004/trainer.json"
    assert changed(run_dir, "DELETE FROM groups") != []
    assert audit_folder(ledger, run_dir, generates=False).problems == []
    state = json.loads(logged.read_text())
    state["steps"][1] = state["steps"][0]
    logged.write_text(json.dumps(state))
    other, problem = audit_folder(ledger, run_dir, generates=False).problems
    assert "is not the checkpoint" in other
    assert problem == "the trainer skipped rows or trained on them twice"


def test_an_empty_ledger_is_a_finding(run_dir: Path) -> None:
    ledger = run_dir / "attempts/1/ledger" / DATABASE
    for path in ledger.parent.glob(f"{DATABASE}*"):
        path.unlink()
    ledger.touch()
    (problem,) = audit_folder(ledger.parent, run_dir).problems
    assert problem == f"{ledger} is damaged or of another version: no such table: facts"
