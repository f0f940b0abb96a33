"""A process of a run that hears something as soon as it has joined."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_core.runtime import frames
from areal_core.runtime.environment import CONNECTION_VARIABLE, GROUP_VARIABLE, GUARD_VARIABLE, PLACES_VARIABLE
from areal_core.runtime.member import ASKED_TO_STOP, DRIVER_GONE
from areal_core.runtime.messages import Finished, Joined, ProcessFailed, Stop, Watch
from areal_core.runtime.rpc import PeerClosed

LIMIT_S = 120.0
PROGRAM = """
import socket, sys, time
from areal_core.runtime.member import Member
Member(socket.socket(fileno=int(sys.argv[1])), "model", "127.0.0.1")
time.sleep(600)
"""


def test_one_that_is_told_to_stop_at_once_says_that_it_has_finished() -> None:
    near, far = socket.socketpair()
    far.settimeout(LIMIT_S)
    frames.send(far, Stop())
    command = [sys.executable, "-c", PROGRAM, str(near.fileno())]
    with near, subprocess.Popen(command, pass_fds=[near.fileno()], stderr=subprocess.PIPE) as program:
        near.close()
        heard = list[Any]()
        try:
            while True:
                heard.append(frames.receive(far).message)
        except PeerClosed:
            pass
        assert program.wait(LIMIT_S) == ASKED_TO_STOP
        assert program.stderr is not None
        assert program.stderr.read() == b""
    assert heard[-1] == Finished()


def test_a_log_on_a_full_disk_loses_lines_and_ends_no_process() -> None:
    code = (
        "import sys\nfrom areal_core.runtime.logs import lose_lines_on_a_full_disk\n"
        "lose_lines_on_a_full_disk()\nprint('x' * 20_000)\nsys.stderr.write('waiting\\n')\nsys.stderr.flush()"
    )
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False).returncode == 0


JOINS = """
import os
from areal_core.runtime.member import join
join()
print(os.environ["NO_PROXY"], os.environ["no_proxy"], flush=True)
os._exit(0)
"""


def run_join(guard: int, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Join a hub that accepts everyone, as a process whose guard has a certain pid."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        near = socket.create_connection(hub.getsockname())
        far, _ = hub.accept()
    frames.send(far, Joined({"NO_PROXY": "intranet"}))
    environment = {
        **os.environ,
        CONNECTION_VARIABLE: str(near.fileno()),
        GUARD_VARIABLE: str(guard),
        GROUP_VARIABLE: "worker",
        PLACES_VARIABLE: json.dumps([[0, "worker-0", "", []]]),
        **variables,
    }
    with near, far:
        return subprocess.run(
            [sys.executable, "-c", JOINS], env=environment, pass_fds=[near.fileno()],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip


def test_no_proxy_applies_to_this_machine_in_a_process_that_joins_a_run() -> None:
    """Everything that the process starts inherits the variables: agents, rewards, servers."""
    done = run_join(os.getpid(), {"HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": ""})
    assert done.stdout.split() == ["intranet,localhost,127.0.0.1,::1"] * 2, done.stderr


def test_a_process_whose_guard_died_before_it_joined_exits() -> None:
    done = run_join(1, {})
    assert (done.returncode, done.stdout) == (DRIVER_GONE, ""), done.stderr


FAILS_IN_A_CALLBACK = """
import signal, socket, sys
from areal_core.runtime import member

def role(connected):
    def fail(*_):
        raise ValueError("of a callback")

    connected.on_stop = fail
    connected.watch("server", fail)
    connected.on_message(fail)
    while True:
        signal.pause()

member.join = lambda: member.Member(socket.socket(fileno=int(sys.argv[1])), "model", "127.0.0.1")
sys.exit(member.run_role(role))
"""


@pytest.mark.parametrize("message", [Stop(), Finished()], ids=["on_stop", "on_message"])
def test_a_callback_that_fails_is_reported_to_the_driver(message: Any) -> None:
    """Callbacks run in the thread that sends the report, so the report must not wait there."""
    near, far = socket.socketpair()
    far.settimeout(LIMIT_S)
    command = [sys.executable, "-c", FAILS_IN_A_CALLBACK, str(near.fileno())]
    with near, subprocess.Popen(command, pass_fds=[near.fileno()], stderr=subprocess.PIPE) as program:
        near.close()
        received = list[Any]()
        while not any(isinstance(former, Watch) for former in received):
            received.append(frames.receive(far).message)
        frames.send(far, message)
        try:
            while True:
                received.append(frames.receive(far).message)
        except PeerClosed:
            pass
        assert program.wait(LIMIT_S) == 1
    failures = [former for former in received if isinstance(former, ProcessFailed)]
    assert [failure.text for failure in failures] == ["ValueError: of a callback"]
