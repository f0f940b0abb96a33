"""The program of `test_fuzz.py`: mutates a complete config, has `areal` look at it, and prints what it did not survive.

Called as `fuzz.py COUNT SEED`, beside `run.yaml`. A case is survived when `areal config check` and an override of the
same key both end by themselves with exit code 0, 1 or 2.
"""

import contextlib
import io
import json
import random
import signal
import sys
from pathlib import Path

from areal_core.cli import main
from areal_core.config import resolve
from areal_core.config.yaml_text import parse_yaml

DEADLINE_S = 10
"""For hangs alone: a case takes some hundredths of a second."""

HOSTILE = [
    "9" * 5000, "0x" + "f" * 5000, "-1", "0", "1e999", "-.inf", ".nan", "1e-400", "2026-01-01", "9" * 40, "0o", "0x",
    "!!int x", "!!float x", "!!bool x", "!!null x", "!!binary x", "!!set {a}", "!!python/object/apply:os.getcwd []",
    '"\\U00110000"', '"\\ud800"', '"a\\0b"', '"a\\0b.py:f"', '"\\x85\\u2028"', '"\\e[2J"', '"' + "a" * 5000 + '"',
    "[" * 1000 + "]" * 1000, "{a: " * 1000 + "}" * 1000, "[" * 50 + "]" * 50, "{a: " * 30 + "b" + "}" * 30,
    "[" + "x," * 300 + "]", "[" + "{type: x}," * 200 + "]", "{" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}",
    "[" + "x," * 20000 + "]", "{" + ", ".join(f"key{i}: 1" for i in range(20000)) + "}", "*nowhere", "&a [*a]",
    "null", "''", "{}", "[]", "[[]]", "[null]", "true", "{type: }", "{type: {type: x}}", "{type: [x]}", "{? [a] : b}",
    "~nobody/x", "'~nobody/x.py:f'", "'./nowhere.py:f'", "'/:x'", "':'", "'x:y'", "'os:getcwd'", "'run.yaml:f'",
    "core/", "/core", "core/core/core", "no:kit", "kit", "env:HOME", "env:", "x" * 300 + ".py:f", "%s%n", "{0}", "`",
    "a: b", "- a", "|\n  a", "? a", "---", "...", "# ",
]  # fmt: skip
CHARACTERS = "\t\n :-[]{}#&*!|>'\"%@`,?\\\0\x1b\x85\ufeff\u2028aZ09._/~=éπ\U0001f600"
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(9))


class Late(BaseException):
    """A case took too long."""


def mutants(text: str, count: int, random_: random.Random):
    """Broken texts, each with an override that sets the same hostile value."""
    lines = text.splitlines()
    paths = [path for path in parse_yaml(text, "config").lines if path]
    every_line = [number for number, line in enumerate(lines) if ":" in line and not line.startswith("#")]
    whole = [
        "",
        "\ufeff",
        "- a",
        "a",
        LAUGHS,
        LAUGHS + text,
        text + text,
        text + "---\n" + text,
        "\x00",
        "%YAML 9.9\n---\n",
    ]
    whole += ["".join(f"key{i}: 1\n" for i in range(20000)), text.replace("\n", "\r"), text[: len(text) // 2]]
    for broken in whole:
        yield broken, "steps=1"
    for number in range(count):
        hostile = HOSTILE[number % len(HOSTILE)]
        changed, line = list(lines), random_.choice(every_line)
        if number % 4 < 2:
            changed[line] = changed[line].partition(":")[0] + ": " + hostile
        elif number % 4 == 2:
            place = random_.randrange(len(changed[line]) + 1)
            noise = "".join(random_.choices(CHARACTERS, k=random_.randrange(1, 6)))
            changed[line] = changed[line][:place] + noise + changed[line][place:]
        else:
            changed.insert(random_.randrange(len(changed)), changed.pop(line))
        yield "\n".join(changed), f"{'.'.join(map(str, random_.choice(paths)))}={hostile}"


def outcome(words: list[str]) -> object:
    """The exit code of `areal`, or what went wrong."""
    try:
        signal.alarm(DEADLINE_S)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return main(words)
    except Late:
        return f"took more than {DEADLINE_S} s"
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        return repr(error)
    finally:
        signal.alarm(0)


def late(*_: object) -> None:
    raise Late


def run(count: int, seed: int) -> None:
    signal.signal(signal.SIGALRM, late)
    path, tried = Path("mutant.yaml"), 0
    for text, override in mutants(resolve("run.yaml").to_yaml(), count, random.Random(seed)):
        path.write_bytes(text.encode(errors="surrogatepass"))
        for words in (["config", "check", str(path)], ["config", "check", "run.yaml", override]):
            found, tried = outcome(words), tried + 1
            if found not in (0, 1, 2):
                print(json.dumps([str(found)[:200], words[-1][:200], text[:200]]))
    print(json.dumps({"tried": tried}))


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
