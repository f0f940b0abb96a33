"""A run in a true terminal: one that is closed, one that nobody reads, and `nohup`."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import termios
import threading
from typing import TYPE_CHECKING

import pytest

from areal_core.runtime.attempts import TAKEOVER_S

if TYPE_CHECKING:
    from tests.integration.conftest import Workplace

pytestmark = pytest.mark.slow
HANG_S = 600


def in_terminal(workplace: Workplace, *words: str) -> tuple[subprocess.Popen[str], int]:
    """`areal` at the head of a session of its own in a terminal; the terminal's other end."""
    main, second = os.openpty()
    process: subprocess.Popen[str] = subprocess.Popen(
        [*workplace.command, *words],
        cwd=workplace.folder,
        env=workplace.environment,
        stdin=second,
        stdout=second,
        stderr=second,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no other thread is there yet
        text=True,
    )
    os.close(second)
    return process, main


def read_for_ever(terminal: int) -> None:
    """As a terminal window does, until it is closed."""

    def read() -> None:
        try:
            while os.read(terminal, 65536):
                pass
        except OSError:
            return

    threading.Thread(target=read, daemon=True).start()


def committed(workplace: Workplace) -> int:
    """The last committed step of a run whose audit is clean."""
    found = workplace.areal("audit", "run", "--json")
    assert found.code == 0, found.out + found.err
    step: int = json.loads(found.out)["committed_step"]
    return step


def test_a_closed_terminal_leaves_a_checkpoint(workplace: Workplace) -> None:
    process, main = in_terminal(workplace, "run", "run.yaml", "run_dir=run", "steps=2000")
    while len(workplace.metrics()) < 3:
        assert process.poll() is None
        os.read(main, 65536)
    os.close(main)
    assert process.wait(HANG_S) == 128 + signal.SIGHUP
    assert committed(workplace) >= 3


@pytest.mark.nightly  # outlasts the lease
def test_a_terminal_that_nobody_reads_does_not_end_the_run(workplace: Workplace) -> None:
    """It is full after a few seconds; the run goes on for longer than its processes would wait for a blocked driver."""
    process, main = in_terminal(
        workplace, "run", "run.yaml", "run_dir=run", "steps=1000000", "checkpoint.every=1000000"
    )
    workplace.wait_for(lambda: len(workplace.metrics()) >= 3, process)
    try:
        process.wait(TAKEOVER_S + 30)
    except subprocess.TimeoutExpired:
        steps = len(workplace.metrics())
        workplace.wait_for(lambda: len(workplace.metrics()) > steps, process)
    assert process.poll() is None
    read_for_ever(main)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_S) == 130
    assert committed(workplace) > 3


@pytest.mark.nightly
def test_nohup_and_suspension_are_honored(workplace: Workplace) -> None:
    words = ["nohup", *workplace.command, "run", "run.yaml", "run_dir=run", "steps=2000"]
    process = subprocess.Popen(
        words,
        cwd=workplace.folder,
        env=workplace.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workplace.wait_for(lambda: len(workplace.metrics()) >= 2, process)
    for number in (signal.SIGHUP, signal.SIGTSTP):
        process.send_signal(number)
    steps = len(workplace.metrics())
    workplace.wait_for(lambda: len(workplace.metrics()) >= steps + 3, process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "cannot be suspended" in out
    assert committed(workplace) >= steps
