"""Processes are not taken for later ones with the same pid, and no descendant is missed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from areal_core.runtime.process_tree import end_session, has_ended, identify

FAMILY = """
import os, subprocess
from areal_core.runtime.process_tree import adopt_orphans, children, end_descendants, kill_children
adopt_orphans()
kept = subprocess.Popen(["sleep", "600"])
# The first shell exits and leaves an orphan; the second lives, with a child in a session of its own.
subprocess.run(["sh", "-c", "setsid sleep 600 &"])
subprocess.Popen(["sh", "-c", "setsid --wait sleep 600 & wait"])
while kill_children(kept=frozenset([kept.pid])):
    pass
assert children() == [kept.pid] and kept.poll() is None
end_descendants()
assert children() == []
"""


def test_orphans_in_sessions_of_their_own_are_killed_and_the_kept_child_is_not() -> None:
    subprocess.run([sys.executable, "-c", FAMILY], check=True, timeout=300)


@pytest.mark.parametrize("wait", ["wait", "true"])
def test_a_session_ends_with_its_processes_whether_its_leader_runs_or_has_ended(wait: str) -> None:
    command = ["sh", "-c", f"sleep 600 >&2 & echo $!; {wait}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stdout is not None
        watched = os.pidfd_open(int(process.stdout.readline()))
        if wait == "true":
            process.wait()
        end_session(process)
        assert process.returncode == (0 if wait == "true" else -signal.SIGKILL)
        assert select.select([watched], [], [], 60) == ([watched], [], [])
        os.close(watched)
        end_session(process)  # safe to call twice


def test_a_process_has_ended_when_it_is_a_zombie_or_gone() -> None:
    assert has_ended(identify(os.getpid())) is False
    with subprocess.Popen(["sleep", "600"]) as process:
        identity = identify(process.pid)
        assert has_ended(identity) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(identity) is True, "a zombie keeps its pid"
    assert has_ended(identity) is True


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    machine, pid, start = identify(os.getpid()).rsplit(" ", 2)
    assert has_ended(f"{machine} {pid} {int(start) - 1}") is True


def test_of_a_process_on_another_machine_nothing_is_known() -> None:
    _, pid, start = identify(os.getpid()).rsplit(" ", 2)
    assert has_ended(f"another-boot/pid:[1] {pid} {start}") is None
