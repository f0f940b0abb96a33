"""The reward by unit tests: what code is worth, and what it cannot get by tricks."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from areal_core.config.context import ResolutionContext
from areal_core.config.place import Place
from areal_core.plugins import PluginManager
from areal_sandboxes.unit_tests import HARNESS, code_in

ASSERTS = "limit = 3\nassert add(1, 2) == limit\nassert add(1, 1) == 2\nassert add('a', 'b') == 'ab'\n"
CHECK = "def check(add):\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4\n\ncheck(add)\n"
PROGRAMS = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6"}, {"input": "4", "output": "7"}]
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def reward(bubblewrap):
    """Makes the reward as a run does, in the true sandbox."""
    bubblewrap()

    def make(**settings):
        context = ResolutionContext(PluginManager.load(["sandboxes"]))
        chosen = Place("reward_functions").select({"type": "sandboxes/unit_tests", **settings}, context)
        return chosen.build()

    return make


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
    assert made.take_metrics() == {"completions": 2, "passed": 1, "ended_by_time": 1}
    assert made.take_metrics() == {}
    short = reward(total_s=0.5, share=True)
    assert score(short, "import time; time.sleep(60)", PROGRAMS) == 0.0
    assert short.take_metrics() == {"completions": 1, "passed": 0, "out_of_time": 1}


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
