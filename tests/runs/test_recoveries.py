"""How often a run goes back by itself before it ends."""

import pytest

from areal_core.errors import LostError, RunError
from areal_core.runs import recoveries as module
from areal_core.runs.recoveries import Recoveries

LOST = LostError("trainer-0 was killed by SIGKILL", hints=["its log: x"])


def test_each_loss_is_told_with_its_count():
    said = []
    found = Recoveries(2, said.append)
    found.note(LOST, "step-000001")
    found.note(LOST, "step-000002")
    assert [line.splitlines()[1] for line in said] == [
        "going back to the last checkpoint (1 of at most 2 times in an hour)",
        "going back to the last checkpoint (2 of at most 2 times in an hour)",
    ]


def test_too_many_in_an_hour_end_the_run_and_those_of_earlier_hours_do_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = Recoveries(2, lambda _: None)
    for step, now in enumerate((0.0, 3000.0, 3700.0, 6700.0)):
        clock[0] = now
        found.note(LOST, f"step-{step}")
    clock[0] = 6800.0
    with pytest.raises(RunError, match="2 times within an hour"):
        found.note(LOST, "step-9")


def test_going_back_to_the_same_checkpoint_again_and_again_ends_the_run_however_slowly(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = Recoveries(3, lambda _: None)
    for _ in range(3):
        found.note(LOST, "step-000004")
        clock[0] += 7200.0
    with pytest.raises(RunError, match="3 times without coming to a new checkpoint"):
        found.note(LOST, "step-000004")


def test_none_are_allowed_where_the_limit_is_0():
    with pytest.raises(RunError, match="was killed by SIGKILL") as found:
        Recoveries(0, lambda _: None).note(LOST, "")
    assert not isinstance(found.value, LostError), "the run does not go back"
