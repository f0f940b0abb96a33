"""The journal keeps each call once, in its order, with its result."""

from __future__ import annotations

import sqlite3

import pytest

from areal_core.errors import RunError
from areal_tinker.errors import RequestError
from areal_tinker.journal import Call, Journal, Result

FACTS = {"base_model": "tiny", "lora_config": None, "user_metadata": None}
DONE = Result(b"result", "application/x-protobuf")


def call(number, kind="forward_backward", request=b"data", model="m"):
    return Call(model, number, kind, request)


def numbers(calls):
    return [(each.model, each.number) for each in calls]


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    for model in ("m", "n"):
        journal.add_model(model, "session", FACTS)
    return journal


def test_calls_wait_for_those_before_them(journal):
    for number in (2, 1, 0):
        assert journal.waiting() == []
        journal.accept(call(number))
    journal.accept(call(0, model="n"))
    for expected in range(3):
        assert ("m", expected) in numbers(journal.waiting())
        journal.finish(call(expected), DONE)
    assert numbers(journal.waiting()) == [("n", 0)]


def test_a_call_that_is_sent_again_is_the_same_call(journal):
    journal.accept(call(0))
    journal.accept(call(0))
    journal.finish(call(0), DONE)
    journal.accept(call(0))
    assert journal.waiting() == []
    assert journal.result("m", 0) == DONE
    for other in (call(0, request=b"other"), call(0, kind="optim_step")):
        with pytest.raises(RequestError, match="seq_id 0 of model m was used for another request"):
            journal.accept(other)


def test_everything_is_there_after_a_restart(tmp_path, journal):
    journal.add_session("s", {})
    journal.add_sampler("s:sample:0", "tinker://m/sampler_weights/a")
    saved = call(5, "save_weights", b'{"ttl_seconds": 10}')
    journal.add_checkpoint("tinker://m/weights/a", saved, "weights", "a", "folder", {"user_metadata": None})
    journal.accept(call(0))
    journal.begin(call(0))
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert again.has_session("s")
    assert again.sampler("s:sample:0") == "tinker://m/sampler_weights/a"
    assert [each["name"] for each in again.checkpoints("m")] == ["a"]
    (waiting,) = again.waiting()
    assert (waiting.request, waiting.attempts) == (b"data", 1)


def test_a_saved_state_drops_what_led_to_it(journal):
    for number in range(4):
        journal.accept(call(number))
        journal.finish(call(number), Result.failure("no", is_of_user=True) if number == 2 else DONE)
    assert [(each.number, each.has_failed) for each in journal.since("m", -1)] == [
        (0, False), (1, False), (2, True), (3, False),
    ]  # fmt: skip
    journal.mark_saved("m", 1)
    saved = journal.saved("m")
    assert (saved, [each.number for each in journal.since("m", saved)]) == (1, [2, 3])
    assert journal.result("m", 0) == DONE, "a client may still ask"
    journal.accept(call(1))  # and send the call again


def test_a_file_of_another_version_is_refused(tmp_path, journal):
    journal._rows.execute("PRAGMA user_version = 0")
    journal.close()
    with pytest.raises(RunError, match="was written by another version of areal-tinker"):
        Journal(tmp_path / "journal.sqlite")


def test_unknown_things_are_errors(journal):
    for ask in (
        lambda: journal.model("x"), lambda: journal.sampler("x"), lambda: journal.result("m", 7),
    ):  # fmt: skip
        with pytest.raises(RequestError) as error:
            ask()
        assert error.value.status == 404


def test_a_change_that_fails_in_the_middle_leaves_nothing_open(tmp_path, journal):
    """Another program holds the database for longer than SQLite waits."""
    journal.add_session("session", {})
    journal.accept(call(0))
    other = sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal._rows.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        journal.finish_session("session")
    other.execute("ROLLBACK")
    journal.finish(call(0), DONE)
    assert other.execute("SELECT COUNT(*) FROM calls WHERE result IS NOT NULL").fetchone() == (1,)


def test_calls_of_a_finished_session_are_refused(journal):
    journal.add_session("session", {})
    journal.accept(call(0))
    assert journal.finish_session("session") == ["m", "n"]
    with pytest.raises(RequestError, match="has finished"):
        journal.accept(call(1))
    assert journal.waiting() == []
