"""The reward by unit tests: which names lead to the program, and what its types are in a test."""

from __future__ import annotations

import asyncio

import pytest

RIGHT = "limit = 3\ndef add(a, b): return a + b\n"
SUM = "def sum(a, b): return a + b"
CHEAT = "def add(a, b): return [0]\ndef sorted(values): return WANTED\ndef all(values): return True\n"


@pytest.fixture
def score(reward):
    """Of code by tests."""
    made = reward()
    return lambda code, tests: asyncio.run(made(completion=code, row={"tests": tests}))


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (RIGHT, "from solution import add\nassert add(1, 2) == 3"),
        (RIGHT, "from solution import add as plus, limit\nassert plus(1, 2) == limit"),
        (RIGHT, "import solution\nassert solution.add(1, 2) == solution.limit and not hasattr(solution, 'other')"),
        (RIGHT, "import solution as s\ndef check(f):\n    assert f(1, 2) == 3\ncheck(s.add)"),
        (RIGHT, "from solution import *\nassert add(1, 2) == 3"),
        (RIGHT, "if __name__ == '__main__':\n    assert add(1, 2) == 3"),
        (SUM, "assert sum(10, 15) == 25"),
        (SUM, ["assert sum(1, 2) == 3", "assert sum(2, 2) == 4"]),
        (SUM, "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(sum)"),
        (SUM, "from solution import sum\nassert abs(sum(1, 2) - 3) < 1e-6"),
        ("def max(values): return values[-1]", "assert max([1, 2]) == 2 and max([2, 1]) == 1"),
    ],
)
def test_names_that_lead_to_the_program(code, tests, score):
    assert score(code, tests) == 1.0
    assert score(code.replace("return ", "return 7 #"), tests) == 0.0
    assert score("def other(): pass", tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "assert sorted(add(1, 2)) == WANTED",
        "from solution import add\nassert sorted(add(1, 2)) == WANTED",
        "import importlib\nadd = importlib.import_module('solution').add\nassert sorted(add(1, 2)) == WANTED",
        "assert all(a == b for a, b in zip(add(1, 2), [1]))",
        "assert eval('all([add(1, 2) == 3])')",
        "add = (add,)[0]\nassert all([add(1, 2) == 3])",
        "if __name__ == '__main__':\n    assert add(1, 2) == 3",
    ],
)
def test_a_program_cannot_replace_what_judges_it(tests, score):
    assert score(CHEAT.replace("WANTED", "[1, 2]"), tests.replace("WANTED", "[1, 2]")) == 0.0


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("import solution_2\nassert add(1, 2) == 3", "they fail without a call: ModuleNotFoundError"),
        ("many = range(3)\nimport nowhere\nassert add(1, 2) == 3", "they fail without a call"),
        ("from solution import add\nimport nowhere\nassert add(1, 2) == 3", "they fail without a call"),
        ("from solution import add\ndef check(f):\n    assert f(1, 2) == 3", "they pass without a call"),
        ("assert abs(sum(1, 2) - 3) < 1e-6", r"they fail .*TypeError.* unless imported: \['abs', 'sum'\]"),
        ("assert len('abc') == 3", "they pass without a call of the program"),
        ("assert max([1, 2]) == 2", "they pass without a call of the program"),
        ("assert isinstance(add(1, 2), add)", "they use an object of the program as a class, in isinstance"),
        ("assert not issubclass(int, (str, add))", "they use an object of the program as a class"),
        ("class Own(add):\n    pass\nassert Own().x == 1", "they use an object of the program as a class"),
        (
            "try:\n    assert add(1, 2) == 4\nexcept (KeyError, add):\n    pass",
            "they use an object of the program as a class",
        ),
        ("import sys\nif __name__ == '__main__':\n    assert 1\n    sys.exit()", "they end Python"),
    ],
)
def test_tests_that_no_program_can_pass_are_an_error(tests, why, score):
    with pytest.raises(ValueError, match=f"the tests of the row, its key 'tests', are wrong: {why}"):
        score(RIGHT, tests)


def raises(kind: str, check: str) -> str:
    return f"try:\n    f()\n    assert False\nexcept {kind} as error:\n    assert {check}"


POINT = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\n"


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(): return {}['k']", raises("KeyError", "error.args[0] == 'k' and str(error) == repr('k')")),
        ("def f(): raise KeyError('a', 2)", raises("LookupError", "error.args == ('a', 2)")),
        ("def f(): return b'\\xff'.decode()", raises("ValueError", "'invalid start byte' in str(error)")),
        (
            "class Own(UnicodeDecodeError):\n    def __str__(self): return 'own'\n"
            "def f(): raise Own('utf-8', b'', 0, 1, 'why')",
            raises("ValueError", "str(error) == 'own'"),
        ),
        ("def f(): open('/nowhere')", raises("FileNotFoundError", "'/nowhere' in str(error)")),
        ("def f(): raise SystemExit(3)", raises("RuntimeError", "str(error) == '3'")),
        (
            "from datetime import timedelta\ndef f(days=1): return timedelta(days, 2, 3)",
            "from datetime import timedelta\nassert f() == timedelta(1, 2, 3) and f(-1).days == -1",
        ),
        (POINT + "def f(): return [Point(1, (2,))]", "p, = f()\nassert p == (1, (2,)) and p.x == 1 and p.y == (2,)"),
        (POINT + "def f(p=Point(1, 2)): return p.x + p.y, p", "n, p = f()\nassert n == 3 and f(p)[1].y == 2"),
    ],
)
def test_what_a_program_raises_and_returns_keeps_its_parts(code, tests, score):
    assert score(code, tests) == 1.0
