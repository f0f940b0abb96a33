"""How ranks may stand, before any of them is started."""

import pytest

from areal_core.errors import RunError
from areal_parallel.mesh import Ranks
from areal_parallel.settings import ParallelSettings


class Mesh:
    """Of a mesh nothing but its size is asked here."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@pytest.mark.parametrize(
    ("settings", "ranks", "word"),
    [
        ({}, 1, ""),
        ({}, 6, ""),
        ({"tensor": 2}, 6, ""),
        ({"tensor": 2, "context": 2, "data": 2}, 8, ""),
        ({"replicas": 2}, 6, ""),
        ({"tensor": 2}, 3, "does not give the 3 ranks"),
        ({"data": 3}, 4, "does not give the 4 ranks"),
        ({"context": 8}, 4, "does not give the 4 ranks"),
        ({"replicas": 2}, 3, "does not divide the 3 ranks"),
        ({"replicas": 2, "tensor": 4}, 4, "does not divide the 1 ranks"),
    ],
)
def test_what_is_wrong_for_so_many_ranks(settings, ranks, word):
    problem = ParallelSettings.model_validate(settings).problem(ranks)
    assert word in problem
    assert bool(word) == bool(problem)


@pytest.mark.parametrize(
    ("tensor", "context", "heads", "key_heads", "wanted"),
    [
        (1, 1, 12, 2, (12, 2)),
        (2, 1, 12, 2, (6, 1)),
        (1, 2, 12, 2, (6, 1)),
        (1, 4, 12, 2, (3, 1)),
        (2, 2, 12, 2, (3, 1)),
        (2, 2, 32, 8, (8, 2)),
    ],
)
def test_heads_of_a_rank(tensor, context, heads, key_heads, wanted):
    assert Ranks(tensor=Mesh(tensor), context=Mesh(context)).heads(heads, key_heads) == wanted


@pytest.mark.parametrize(
    ("tensor", "context", "heads", "key_heads"), [(4, 1, 12, 2), (1, 8, 12, 2), (1, 3, 12, 2), (1, 4, 24, 6)]
)
def test_heads_that_cannot_be_divided(tensor, context, heads, key_heads):
    with pytest.raises(RunError, match=f"{heads} heads of attention with {key_heads} key heads"):
        Ranks(tensor=Mesh(tensor), context=Mesh(context)).heads(heads, key_heads)
