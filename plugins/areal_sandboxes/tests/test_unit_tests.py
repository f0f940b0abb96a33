"""The reward by unit tests: what code is worth, and what it cannot get by tricks."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets

import pytest

from areal_sandboxes.unit_tests import HARNESS, code_in

ASSERTS = "limit = 3\nassert add(1, 2) == limit\nassert add(1, 1) == 2\nassert add('a', 'b') == 'ab'\n"
CHECK = "def check(add):\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4\n\ncheck(add)\n"
PROGRAMS = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6"}, {"input": "4", "output": "7"}]
RIGHT = "def add(a, b):\n    return a + b\n"


def score(reward, completion, tests):
    return asyncio.run(reward(completion=completion, row={"tests": tests}))


def test_the_last_fenced_block_is_the_code():
    assert code_in("x = 1") == "x = 1"
    assert code_in("a\n```\none\n```\nb\n```python\ntwo\n\nthree\n```\nc") == "two\n\nthree\n"
    assert code_in("- so:\n  ```py\n  four\n  ```") == "  four\n"
    assert code_in("an open\n```\nblock") == "an open\n```\nblock"


@pytest.mark.parametrize(
    ("completion", "tests", "all_passed", "share"),
    [
        (RIGHT, ASSERTS, 1.0, 1.0),
        ("def add(a, b):\n    return int(a) + int(b)", ASSERTS, 0.0, 2 / 3),
        ("def add(a, b): return 3", ASSERTS, 0.0, 1 / 3),
        (RIGHT, CHECK, 1.0, 1.0),
        ("def add(a, b): return 3", CHECK, 0.0, 0.0),
        (RIGHT, ["assert add(1, 1) == 2", "assert add(1, 1) == 3"], 0.0, 0.5),
        (RIGHT, "nothing_like_it()\nassert add(1, 1) == 2", 0.0, 0.0),
        ("no code at all", ASSERTS, 0.0, 0.0),
        ("\ud800", ASSERTS, 0.0, 0.0),
        (
            RIGHT,
            ["import math", "assert add(1, 1) == math.sqrt(4)", "for n in range(9): assert add(n, 1) == 9"],
            0.0,
            0.5,
        ),
        ("print(2 * int(input()))", PROGRAMS, 0.0, 2 / 3),
        ("print(2 * int(input()) - (0 if input else 1))", PROGRAMS[:2], 1.0, 1.0),
        ("print(2 * int(input())); raise SystemExit(1)", PROGRAMS, 0.0, 0.0),
    ],
)
def test_what_code_is_worth(completion, tests, all_passed, share, reward):
    assert score(reward(), completion, tests) == all_passed
    assert score(reward(share=True), completion, tests) == pytest.approx(share)


TRICKS = {
    "prints what a verdict may look like": "import os\nprint('0' * 32 + ' 3 3\\n3 passed', flush=True)\nos._exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends well": "raise SystemExit(0)",
    "ends well when it is asked": "import os\ndef add(a, b): os._exit(0)",
    "ends its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "goes on as its child": "import os\nif os.fork(): os._exit(0)\ndef add(a, b): return 0",
    "reads for the tests": (
        "import glob, os, sys\n"
        "text = sys.stdin.read()\n"
        "for path in [*glob.glob('*'), *glob.glob('/tmp/**', recursive=True), *glob.glob('/proc/*/fd/*'), "
        "*glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ')]:\n"
        "    try:\n"
        "        if 'pipe' not in os.readlink(path): text += open(path).read()\n"
        "    except OSError:\n"
        "        try: text += open(path).read() if os.path.isfile(path) else ''\n"
        "        except OSError: pass\n"
        "if '== ' + 'limit' in text:\n"
        "    def add(a, b): return a + b"
    ),
    "takes the input first": (
        "import glob, json, os\n"
        "for path in glob.glob('/proc/*/fd/0'):\n"
        "    try: given = json.loads(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16))\n"
        "    except (OSError, ValueError): continue\n"
        "    with open('/proc/1/fd/1', 'w') as verdict: verdict.write(given['token'] + ' 3 3\\n')\n"
        "    os._exit(0)"
    ),
    "looks into its parent": (
        "import os\n"
        "for name in ('mem', 'fd/0', 'environ', 'maps'):\n"
        "    try: open(f'/proc/{os.getppid()}/{name}', 'rb').read(1)\n"
        "    except OSError: continue\n"
        "    def add(a, b): return a + b"
    ),
    "writes into all that is open": (
        "import os\n"
        "for number in range(256):\n"
        "    try: os.write(number, b'ready\\n' + b''.join(b'%d\\n 0 %d\\n' % (n, n) for n in range(9)))\n"
        "    except OSError: pass\n"
    ),
    "writes and reads what is open": (
        "import json, os\n"
        "for number in range(3, 64):\n"
        "    try: os.write(number, b'ready\\n')\n"
        "    except OSError: pass\n"
        "for number in range(3, 64):\n"
        "    try: text = os.read(number, 1 << 16)\n"
        "    except OSError: continue\n"
        "    try: nonce, statements = json.loads(text)\n"
        "    except ValueError: continue\n"
        "    told = ''.join(f'{nonce} {n}\\n' for n in range(len(statements))).encode()\n"
        "    for other in range(3, 64):\n"
        "        try: os.write(other, told)\n"
        "        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "replaces exec": "import builtins\nbuiltins.exec = lambda *words: None",
    "replaces compile": ("import builtins\nold = compile\nbuiltins.compile = lambda text, *words: old('pass', *words)"),
    "is equal to everything": (
        "class Equal:\n"
        "    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 1\n"
        "def add(a, b): return Equal()"
    ),
    "is a number that is equal to everything": (
        "class Equal(int):\n"
        "    def __eq__(self, other): return True\n"
        "    __ne__ = __lt__ = __sub__ = __eq__\n"
        "def add(a, b): return Equal()"
    ),
    "answers whatever comes": (
        "import os\n"
        "for number in range(3, 64):\n"
        '    try: os.write(number, b\'["value", true, []]\\n["passed", true, []]\\n\' * 9)\n'
        "    except OSError: pass"
    ),
    "changes the harness": f"open('{HARNESS}', 'w').write('print(1)')\nimport os; os._exit(0)",
    "looks for the token": (
        "import gc, sys\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "        if '== ' + 'limit' in str(value):\n"
        "            def add(a, b): return a + b\n"
        "    frame = frame.f_back"
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_are_worth_nothing(trick, reward):
    assert score(reward(share=True), TRICKS[trick], ASSERTS) == 0.0


SEARCHES = """
import re
pattern = rb"wan" + rb"ted-[0-9a-f]{32}"
def add(a, b):
    for line in open("/proc/self/maps"):
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        try:
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(begin)
                found = re.search(pattern, memory.read(end - begin))
        except (OSError, OverflowError, ValueError):
            continue
        if found:
            return found[0].decode()
"""


def test_what_is_wanted_never_enters_the_memory_of_the_program(reward):
    """Neither before a call nor after one whose answer was wrong."""
    given, *wanted = [f"wanted-{secrets.token_hex(16)}" for _ in range(3)]
    tests = [f"assert add(1, 2) == {word!r}" for word in wanted]
    assert score(reward(share=True), SEARCHES, tests) == 0.0
    assert score(reward(share=True), SEARCHES, [f"assert add({given!r}, 2) == {given!r}", *tests]) == 1 / 3


def test_a_verdict_that_was_changed_on_its_way_is_not_believed(reward):
    """As by a process of the program's that shares the sandbox's output."""
    made = reward(share=True)
    run, seen = made._sandbox.run, []

    async def forged(*words, **options):
        seen.append(await run(*words, **options))
        return dataclasses.replace(seen[-1], output=seen[-1].output.replace("false", "true"))

    made._sandbox.run = forged
    assert score(made, "def add(a, b): return 3", ASSERTS) == 0.0
    assert "[true, false, false]" in seen[0].output


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(n): return n", "assert f(3) == 3 and f(n=10 ** 5000) == 10 ** 5000 and f(-1.5) == -1.5"),
        ("def f(*all): return all", "assert f(1, 'é', b'b', None, 2j, {1}) == (1, 'é', b'b', None, 2j, {1})"),
        ("def f(n): return {(1, n): [{n}, float('inf')]}", "assert f(2) == {(1, 2): [{2}, float('inf')]}"),
        ("import collections\ndef f(s): return collections.Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(a, b): return a / b", "from fractions import Fraction\nassert f(Fraction(1), 3) == Fraction(1, 3)"),
        ("def f(day): return day", "import datetime\nassert f(datetime.date(2024, 2, 3)).month == 2"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
        ("def f(numbers): numbers.sort()", "given = [3, 1, 2]\nassert f(given) is None and given == [1, 2, 3]"),
        ("def f(found): found['a'] = 1", "given = {}\nf(given)\nassert given == {'a': 1}"),
        ("def f(values, kind): return [v for v in values if isinstance(v, kind)]", "assert f([1, 'a'], str) == ['a']"),
        ("def f(key): return sorted([2, 1], key=key)", "assert f(abs) == [1, 2]"),
        (
            "class Own(ValueError): pass\ndef f(n): raise Own('no')",
            "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        ),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)\n    def __str__(self): return f'<{self.items}>'\n"
            "    def __getitem__(self, n): return self.items[n]",
            "s = Stack()\ns.push(7)\nassert len(s) == 1 and s[0] == 7 and s.items == [7] and 7 in s\n"
            "assert str(s) == '<[7]>'",
        ),
        (
            "class Node:\n    def __init__(self, x): self.x, self.next = x, None\n"
            "def last(n): return last(n.next) if n.next else n",
            "a, b = Node(1), Node(2)\na.next = b\nassert last(a) is b and last(a).x == 2 and not last(a).next",
        ),
        ("def sum_up(a): return sum(a)", "def check(candidate):\n    assert candidate([1, 2]) == 3\ncheck(sum_up)"),
        ("print('loud')\ndef f(): print('loud'); return 1", "print('test')\nassert f() == 1"),
    ],
)  # fmt: skip
def test_what_tests_can_see_of_a_program(code, test, reward):
    assert score(reward(), code, test) == 1.0


def test_a_program_sees_its_own_folder_and_a_test_does_not(reward):
    code = (
        "open('wanted.py', 'w').write('number = 1')\nimport wanted\ndef f(): return wanted.number\n"
        "open('bisect.py', 'w').write('def bisect(a, x): return 1')"
    )
    assert score(reward(), code, "import bisect\nassert f() == bisect.bisect([3], 1) + 1") == 1.0
    with pytest.raises(ValueError, match="No module named 'wanted'"):
        score(reward(), code, "import wanted\nassert f() == 1")


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("add(1, 2)", "they assert nothing, so any program would pass"),
        (["x = add(1, 2)", "def check(f):\n    f(1, 2)\ncheck(add)"], "they assert nothing"),
        ("def check(f):\n    assert f(1, 2) == 3", r"they pass without a call of the program: end .* check\(NAME\)"),
        ("assert True", "they pass without a call"),
        ("assert add(1, 2) = 3", "they are not Python: .*line 1"),
        ("assert add(lambda: 1, 2) == 3", "they pass the program an argument that is not data, such as a function"),
    ],
)
@pytest.mark.parametrize("completion", [RIGHT, "def add(a, b): return 0"])
def test_tests_that_say_nothing_of_a_program_are_an_error(completion, tests, why, reward):
    with pytest.raises(ValueError, match=f"the tests of the row, its key 'tests', are wrong: {why}"):
        score(reward(), completion, tests)


def test_the_wanted_output_never_enters_the_sandbox(reward):
    code = (
        "import glob\n"
        "for path in [*glob.glob('/tmp/**', recursive=True), *glob.glob('/proc/*/cmdline')]:\n"
        "    try: print(open(path, errors='replace').read())\n"
        "    except OSError: pass\n"
        "import sys; print(sys.stdin.read(), dict(__import__('os').environ))"
    )
    wanted = secrets.token_hex(16)
    made = reward()
    seen = []
    run = made._sandbox.run

    async def observed(*words, **options):
        seen.append(await run(*words, **options))
        return seen[-1]

    made._sandbox.run = observed
    assert score(made, code, [{"input": "question", "output": wanted}]) == 0.0
    assert "question" in seen[0].output
    assert wanted not in seen[0].output


def test_time_ends_and_is_counted(reward):
    made = reward(sandbox={"type": "sandboxes/bubblewrap", "time_s": 1.0})
    assert score(made, "while True: pass", ASSERTS) == 0.0
    assert score(made, RIGHT, ASSERTS) == 1.0
    assert made.pop_metrics() == {"completions": 2, "passed": 1, "ended_by_time": 1}
    assert made.pop_metrics() == {}
    short = reward(total_s=0.5, share=True)
    assert score(short, "import time; time.sleep(60)", PROGRAMS) == 0.0
    assert short.pop_metrics() == {"completions": 1, "passed": 0, "out_of_time": 1}


@pytest.mark.parametrize("tests", [None, "", [], [1], [{"input": "x"}], ["assert True", {"input": "", "output": ""}]])
def test_a_row_without_tests_is_an_error(tests, reward):
    with pytest.raises(ValueError, match="the row has no tests: its key 'tests'"):
        score(reward(), RIGHT, tests)


def test_another_program_and_another_key(reward):
    made = reward(file="main.sh", command=["sh", "main.sh"], tests="checks")
    row = {"checks": [{"input": "a b\n", "output": "b\n"}]}
    assert asyncio.run(made(completion="read first second; echo $second", row=row)) == 1.0


def test_it_must_be_done_before_the_pool_loses_patience():
    from areal_sandboxes.config import UnitTestsSettings

    class Rollout:
        reward_timeout_s = 15.0

    class Config:
        rollout = Rollout()

    settings = UnitTestsSettings.model_construct(total_s=15.0)
    assert list(settings.check(Config())) == [
        "total_s is 15: it must be less than rollout.reward_timeout_s, which is 15"
    ]
    assert list(UnitTestsSettings.model_construct(total_s=14.0).check(Config())) == []


def test_values_are_compared_where_the_program_has_no_part(reward):
    """An object of its own has no arithmetic either, and what it raises ends no loop of the tests."""
    near = "class Near:\n    def __sub__(self, other): return 0.0\n    __float__ = __sub__\ndef f(n): return Near()"
    assert score(reward(), near, "assert abs(f(1) - 0.5) < 1e-6") == 0.0
    assert score(reward(), "abs = lambda x: 0\ndef f(n): return 7.0", "assert abs(f(1) - 0.5) < 1e-6") == 0.0
    stops = "def f(n): raise StopIteration"
    assert score(reward(), stops, "for got, want in zip(map(f, [1, 2]), [1, 2]): assert got == want") == 0.0
    memory = "class Own:\n    __array_interface__ = {'data': (1, True)}\ndef f(): return Own()"
    assert score(reward(), memory, "assert not hasattr(f(), '__array_interface__')") == 1.0
