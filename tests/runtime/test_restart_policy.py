"""What follows from the end of a process, and from a lost attempt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import OnExit, Place, ProcessEnd, ProcessGroup
from areal_core.runtime import restart_policy
from areal_core.runtime.hub import Process
from areal_core.runtime.member import ASKED_TO_STOP
from areal_core.runtime.messages import ProcessFailed
from areal_core.runtime.restart_policy import (
    FAILED_STARTS,
    WINDOW_S,
    Action,
    AttemptPolicy,
    Decision,
    RestartPolicy,
    ends_attempt,
)

KILLED = -9
LOST = LostError("trainer-0 was killed by SIGKILL", hints=["its log: x"])
OWN_CAUSE = ProcessFailed("no such model", (), 1, "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(restart_policy.time, "monotonic", lambda: now[0])
    return now


def ended_process(
    role: str = "server",
    code: int | None = KILLED,
    *,
    on_exit: OnExit = OnExit.RESTART,
    restarts: int | None = None,
    is_ready: bool = False,
) -> Process:
    group = ProcessGroup(role, role, ["true"], on_exit=on_exit, restarts=restarts)
    loop = asyncio.new_event_loop()
    ended: asyncio.Future[ProcessEnd] = loop.create_future()
    ended.set_result(ProcessEnd(code))
    loop.close()
    return Process(group, 0, Place("here"), 1, {}, Path("log"), is_ready=is_ready, ended=ended)


def decide(policy: RestartPolicy, process: Process, failure: ProcessFailed | None = None) -> Decision:
    return policy.after_end(process, failure, is_watched=False)


def test_a_process_that_never_comes_up_is_given_up_after_some_starts_each_after_a_longer_pause() -> None:
    policy, process = RestartPolicy(), ended_process()
    decisions = [decide(policy, process) for _ in range(FAILED_STARTS)]
    assert [decision.action for decision in decisions] == [Action.RESTART] * (FAILED_STARTS - 1) + [Action.GIVE_UP]
    assert [decision.pause_s for decision in decisions[:-1]] == [1.0, 5.0]
    assert decisions[-1].reason == (
        f"could not be started {FAILED_STARTS} times in a row, the last time: was killed by SIGKILL"
    )


def test_a_process_that_reports_a_cause_before_it_is_ready_is_not_tried_again() -> None:
    decision = decide(RestartPolicy(), ended_process(), OWN_CAUSE)
    assert decision == Decision(Action.GIVE_UP, reason="ended before it was ready: no such model")


def test_the_consequence_of_another_failure_is_no_cause_of_its_own() -> None:
    consequence = ProcessFailed("the controller was lost", (), 1, "", is_consequence=True)
    assert decide(RestartPolicy(), ended_process(), consequence).action is Action.RESTART


def test_a_process_that_was_ready_is_given_up_only_after_as_many_ends_as_its_group_may_have(
    clock: list[float],
) -> None:
    policy, process = RestartPolicy(), ended_process(restarts=2, is_ready=True)
    assert [decide(policy, process) for _ in range(2)] == [Decision(Action.RESTART, 0.2)] * 2
    clock[0] += WINDOW_S + 1
    assert decide(policy, process).action is Action.RESTART, "ends of long ago do not count"
    assert decide(policy, process).action is Action.RESTART
    assert decide(policy, process).reason.startswith("ended 3 times in 300 s; the last time: was killed")


@pytest.mark.usefixtures("clock")
def test_a_process_that_was_ready_once_is_tried_for_ever() -> None:
    policy = RestartPolicy()
    decide(policy, ended_process(is_ready=True))
    decisions = [decide(policy, ended_process()) for _ in range(10 * FAILED_STARTS)]
    assert {decision.action for decision in decisions} == {Action.RESTART}
    assert max(decision.pause_s for decision in decisions) == 30.0


def test_only_a_server_or_a_watched_process_may_be_missing_when_it_is_given_up() -> None:
    assert decide(RestartPolicy(), ended_process("server"), OWN_CAUSE).action is Action.GIVE_UP
    worker = ended_process("rollout_worker")
    assert decide(RestartPolicy(), worker, OWN_CAUSE).action is Action.END_RUN
    assert RestartPolicy().after_end(worker, OWN_CAUSE, is_watched=True).action is Action.GIVE_UP


def test_nothing_follows_from_an_end_that_was_asked_for_or_that_comes_after_the_work() -> None:
    stopping, finished, idle = ended_process(), ended_process(code=0), ended_process(code=0)
    stopping.is_stopping = True
    finished.has_finished = True
    actions = [decide(RestartPolicy(), process).action for process in (stopping, finished, idle)]
    assert actions == [Action.NOTHING, Action.NOTHING, Action.RESTART]


@pytest.mark.parametrize(
    ("code", "has_finished", "end_reason", "is_end"),
    [
        (0, True, "", False),
        (0, False, "", False),
        (ASKED_TO_STOP, False, "", False),
        (ASKED_TO_STOP, False, "the others have stopped", False),  # it stopped just before it was terminated
        (0, True, "the others have stopped", False),
        (0, False, "the others have stopped", True),
        (1, False, "", True),
        (KILLED, False, "", True),
        (None, False, "here: its machine does not see the run folder", True),
    ],
)
def test_which_ends_of_an_essential_process_end_its_attempt(
    code: int | None, has_finished: bool, end_reason: str, is_end: bool
) -> None:
    process = ended_process("trainer", code, on_exit=OnExit.END_ATTEMPT)
    process.has_finished, process.end_reason = has_finished, end_reason
    assert ends_attempt(process) is is_end
    assert decide(RestartPolicy(), process).action is (Action.END_ATTEMPT if is_end else Action.NOTHING)


def test_a_rank_that_crashes_after_it_has_reported_that_its_work_is_done_ends_nothing() -> None:
    process = ended_process("trainer", -11, on_exit=OnExit.END_ATTEMPT)
    assert ends_attempt(process)
    process.has_finished = True
    assert not ends_attempt(process)


def test_failed_starts_of_an_earlier_attempt_do_not_count() -> None:
    policy, process = RestartPolicy(), ended_process()
    for _ in range(FAILED_STARTS - 1):
        assert decide(policy, process).action is Action.RESTART
    policy.begin_attempt()
    assert decide(policy, process).action is Action.RESTART


def test_a_process_that_hangs_is_terminated_if_it_can_be_replaced() -> None:
    policy = RestartPolicy()
    assert policy.after_hang(ended_process()) is Action.TERMINATE
    assert policy.after_hang(ended_process(on_exit=OnExit.END_ATTEMPT)) is Action.END_ATTEMPT


def test_each_lost_attempt_is_reported_with_its_count() -> None:
    policy = AttemptPolicy(2)
    messages = [policy.after_loss(LOST, checkpoint) for checkpoint in ("step-000001", "step-000002")]
    assert [message.splitlines()[1] for message in messages] == [
        "going back to the last checkpoint (1 of at most 2 times without a new one)",
        "going back to the last checkpoint (1 of at most 2 times without a new one)",
    ]


@pytest.mark.parametrize("checkpoint", ["", "step-00000000"])
def test_without_a_checkpoint_the_message_says_that_the_run_starts_over(checkpoint: str) -> None:
    message = AttemptPolicy(2).after_loss(LOST, checkpoint)
    assert message.splitlines()[1] == (
        "no checkpoint yet: the run starts over (1 of at most 2 times without a new one)"
    )


def test_going_back_to_the_same_checkpoint_again_and_again_ends_the_run() -> None:
    policy = AttemptPolicy(3)
    policy.after_loss(LOST, "step-000002")
    for _ in range(3):
        policy.after_loss(LOST, "step-000004")
    with pytest.raises(RunError, match="3 times without reaching a new checkpoint"):
        policy.after_loss(LOST, "step-000004")


def test_no_further_attempt_is_allowed_with_a_limit_of_0() -> None:
    with pytest.raises(RunError, match="was killed by SIGKILL") as raised:
        AttemptPolicy(0).after_loss(LOST, "")
    assert not isinstance(raised.value, LostError), "the run does not go back"
