"""GPUs that are counted through all nodes, and the node that a process is put on."""

import pytest

from areal_core.errors import RunError
from areal_core.launchers.nodes import Nodes


@pytest.fixture
def nodes():
    found = Nodes()
    for name, gpus in {"a": 4, "b": 2, "c": 4}.items():
        found.add(name, gpus)
    return found


def idle(_: str) -> int:
    return 0


def test_a_gpu_is_found_on_its_node_and_numbered_there(nodes):
    assert [nodes.node_of(number) for number in (0, 3, 4, 5, 6, 9)] == ["a", "a", "b", "b", "c", "c"]
    assert nodes.local("c", [6, 9]) == (0, 3)
    assert nodes.choose([4, 5], idle) == "b"
    assert nodes.spread(3, [3, 4, 6]) == ["a", "b", "c"]


def test_gpus_that_belong_together_lie_on_one_node(nodes):
    with pytest.raises(RunError, match="3, 4 belong together and lie on a and b"):
        nodes.choose([3, 4], idle)


def test_a_gpu_that_there_is_not_is_named_with_what_there_is(nodes):
    with pytest.raises(RunError, match="GPU 10, which there is not: a has 0 to 3, b has 4 to 5, c has 6 to 9"):
        nodes.spread(1, [10])


def test_a_node_keeps_its_numbers_when_another_goes_and_has_them_again_when_it_is_back(nodes):
    del nodes.gpus["b"]
    assert nodes.node_of(6) == "c"
    with pytest.raises(RunError, match="GPU 4"):
        nodes.node_of(4)
    nodes.add("d", 2)
    nodes.add("b", 2)
    assert [nodes.node_of(number) for number in (4, 10, 11)] == ["b", "d", "d"]


def test_without_gpus_ranks_come_in_blocks_and_others_go_where_least_is_done(nodes):
    assert nodes.spread(5, None) == ["a", "a", "b", "b", "c"]
    assert nodes.spread(2, None) == ["a", "b"]
    assert nodes.choose(None, {"a": 2, "b": 1, "c": 1}.__getitem__) == "b"


def test_a_machine_that_does_not_say_how_many_gpus_it_has_is_believed():
    silent = Nodes()
    silent.add("machine", 0)
    assert silent.choose([2, 3], idle) == "machine"
    assert silent.local("machine", [2, 3]) == (2, 3)
    assert silent.spread(2, [2, 3]) == ["machine", "machine"]


def test_without_a_node_there_is_no_place():
    with pytest.raises(RunError, match="no node left"):
        Nodes().choose(None, idle)


def test_room_is_found_where_gpus_are_free_on_nodes_that_come_later_too(nodes):
    assert nodes.find_room(2, None, {0, 1, 2}, ()) == ("b", (4, 5))
    assert nodes.find_room(1, None, {0, 1, 2}, ()) == ("a", (3,))
    assert nodes.find_room(2, {3, 5, 7, 9}, {0, 1, 2}, ()) == ("c", (7, 9)), "only of those that are named"
    full = set(range(10))
    with pytest.raises(RunError, match="no node has 2 GPUs that no process holds"):
        nodes.find_room(2, None, full - {3, 4}, ())
    nodes.add("d", 2)
    assert nodes.find_room(2, None, full, ()) == ("d", (10, 11))


def test_without_gpus_there_is_room_where_nothing_is_served():
    found = Nodes()
    found.add("a", 0)
    found.add("b", 0)
    assert found.find_room(1, None, (), {"a"}) == ("b", None)
    with pytest.raises(RunError, match="no node is without a server"):
        found.find_room(1, None, (), {"a", "b"})
