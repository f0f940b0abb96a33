"""Which members are started again, and when they are given up."""

import asyncio
from pathlib import Path

import pytest

from areal_core.driver import restarts
from areal_core.driver.hub import Process
from areal_core.driver.restarts import FAILED_STARTS, WINDOW_S, Restarts
from areal_core.interfaces.launcher import EndMeans, Place, ProcessEnd, ProcessGroup
from areal_core.messages.hub import Failing


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: now[0])
    return now


def server(*, restarts=None, is_ready=False):
    group = ProcessGroup("server", "server", ["true"], end=EndMeans.REPLACED, restarts=restarts)
    loop = asyncio.new_event_loop()
    ended: asyncio.Future[ProcessEnd] = loop.create_future()
    loop.close()
    return Process(group, 0, Place("here"), 1, {}, Path("log"), is_ready=is_ready, ended=ended)


def test_who_never_comes_up_is_given_up_after_some_starts_each_after_a_longer_pause():
    starts, process = Restarts(), server()
    told = [starts.after(process, None, "was killed by SIGKILL") for _ in range(FAILED_STARTS)]
    pauses = [pause_s for pause_s, reason in told if not reason]
    assert pauses == sorted({*pauses})
    assert len(pauses) == FAILED_STARTS - 1
    assert told[-1][1] == f"could not be started {FAILED_STARTS} times in a row, the last time: was killed by SIGKILL"


def test_who_says_what_is_wrong_before_it_is_ready_is_not_tried_again():
    said = Failing("no such model", (), 1, "", False, False)
    _, reason = Restarts().after(server(), said, said.text)
    assert reason == "ended before it was ready: no such model"


def test_who_has_served_is_given_up_only_for_as_many_ends_as_its_group_may_have(clock):
    starts, process = Restarts(), server(restarts=2, is_ready=True)
    assert [starts.after(process, None, "ended")[1] for _ in range(2)] == ["", ""]
    clock[0] += WINDOW_S + 1
    assert starts.after(process, None, "ended")[1] == "", "ends of long ago do not count"
    assert starts.after(process, None, "ended")[1] == ""
    assert starts.after(process, None, "ended")[1].startswith("ended 3 times in 300 s; the last time: ended")


def test_who_has_served_is_tried_for_ever(clock):
    starts = Restarts()
    starts.after(server(is_ready=True), None, "ended")
    process = server()
    assert all(not starts.after(process, None, "ended")[1] for _ in range(10 * FAILED_STARTS))
