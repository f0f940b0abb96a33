"""Terminals that nobody reads, and terminals that are gone; both true pseudo-terminals."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core.cli.output import print_error
from areal_core.runtime.terminal import Terminal, log

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HANG_S = 120

SAYS = """
import sys, time
from areal_core.runtime.terminal import Terminal, log
terminal = Terminal()
for number in range(20_000):
    terminal.log(f"line {number} " + "x" * 80)
sys.stderr.write("SAID\\n")
sys.stderr.flush()
terminal.close()
sys.stderr.write("CLOSED\\n")
"""


def test_what_others_wrote_does_not_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log("worker-0: the end of its log:\n\x1b[2J\x1b[1;31mred\x1b[0m\tthen \x07\x9b2J\x7f\r\u00e9\u2713")
    print_error("error: \x1b]0;title\x07")
    assert capsys.readouterr() == (
        "worker-0: the end of its log:\nred\tthen 2J\u00e9\u2713\n",
        "areal: error: ]0;title\n",
    )


GONE = """
import sys, time
from areal_core.runtime.terminal import Terminal
sys.stdin.readline()
terminal = Terminal()
terminal.log("to nobody")
terminal.log("again")
terminal.close()
print("neither this")
open(sys.argv[1], "w").write("went on")
"""


def start(program: str, *words: str, errors: bool = False) -> tuple[subprocess.Popen[bytes], int]:
    """A program with a terminal for its output, perhaps its errors, and the terminal's other end; buffered."""
    main, second = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=second,
        stderr=second if errors else subprocess.PIPE,
    )
    os.close(second)
    return process, main


def read(main: int) -> bytes:
    """Everything that is written to a terminal from now on."""
    shown = b""
    with contextlib.suppress(OSError):
        while part := os.read(main, 65536):
            shown += part
    return shown


def test_what_is_said_is_kept_for_its_user_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.log_path = tmp_path / "driver.log"
    terminal.log("trainer-0 was killed\x1b[2J")
    terminal.close()
    terminal.keep("and nothing came of it \ud800")
    first, second = terminal.log_path.read_text().splitlines()
    assert first.endswith(" trainer-0 was killed")
    assert second.endswith(" and nothing came of it ?")
    assert terminal.log_path.stat().st_mode & 0o777 == 0o600
    assert "trainer-0 was killed" in capsys.readouterr().out
    terminal.log_path = tmp_path / "no folder" / "driver.log"
    terminal.keep("a line that no disk takes")


def test_a_terminal_that_nobody_reads_holds_nothing_up() -> None:
    process, main = start(SAYS)
    _, errors = process.communicate(timeout=HANG_S)
    os.close(main)
    assert process.returncode == 0
    assert errors == b"SAID\nCLOSED\n"


def test_one_that_is_read_again_is_told_what_was_left_out() -> None:
    process, main = start(SAYS)
    assert process.stderr is not None
    assert process.stderr.readline() == b"SAID\n"
    shown = read(main)
    assert process.wait(HANG_S) == 0
    assert b" lines were dropped while the terminal was blocked" in shown
    assert b"line 19999 " in shown


def test_an_error_for_a_terminal_that_is_gone_ends_nothing() -> None:
    program = "from areal_core.cli.output import print_error; input(); print_error('to nobody')"
    process, main = start(program, errors=True)
    os.close(main)
    process.communicate(b"\n", timeout=HANG_S)
    assert process.returncode == 0


@pytest.mark.parametrize("errors", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path, errors: bool) -> None:
    process, main = start(GONE, str(tmp_path / "mark"), errors=errors)
    os.close(main)
    process.communicate(b"\n", timeout=HANG_S)
    assert process.returncode == 0
    assert (tmp_path / "mark").read_text() == "went on"


def test_letters_that_the_terminal_does_not_have_are_written_as_codes() -> None:
    code = "from areal_core.runtime.terminal import log; log('run folder: /tmp/g\\u00e9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "run folder: /tmp/g\\xe9\n"), done.stderr
