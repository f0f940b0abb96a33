"""The state machine of servers is what the docstring of `Lifecycle` says, and nothing leaves it."""

from __future__ import annotations

import itertools

import pytest

from areal_core.inference.lifecycle import Lifecycle
from areal_core.inference.pool import ServerPool
from areal_core.inference.server import TRANSITIONS, InferenceServer, State


def rows():
    """The rows of the table: states, the state that follows, the event and the method."""
    lines = [line.strip() for line in Lifecycle.__doc__.splitlines() if line.count("|") == 3]
    assert lines[0].startswith("from")
    for line in lines[2:]:
        former, to, event, method = (cell.strip() for cell in line.split("|"))
        yield [State[name] for name in former.split(", ")], State[to], event, method


def test_the_table_in_the_docstring_has_every_transition_and_no_other():
    documented = {(former, to) for formers, to, _, _ in rows() for former in formers}
    assert documented == {(former, to) for former, followers in TRANSITIONS.items() for to in followers}
    assert set(TRANSITIONS) == set(State)


def test_every_transition_has_an_event_and_a_method_that_exists():
    for _, _, event, method in rows():
        assert event
        assert hasattr(Lifecycle, method) or hasattr(ServerPool, method), method


@pytest.mark.parametrize(("former", "to"), list(itertools.permutations(State, 2)))
def test_a_pool_makes_only_these_transitions(former, to, tmp_path):
    class Connection:
        def close(self):
            """Nothing is open."""

    pool = ServerPool(tmp_path / "servers.jsonl")
    server = InferenceServer("a", None, Connection(), "recompute", state=former)
    pool.lose(server, "a reason", to)
    assert server.state is (to if to in TRANSITIONS[former] else former)
    server.state = former
    {State.READY: pool.put_back, State.UPDATING: pool.hold}.get(to, lambda _: pool.move(server, to))(server)
    assert server.state is (to if to in TRANSITIONS[former] else former)
