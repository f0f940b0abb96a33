"""A process of a run that hears something as soon as it has joined."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from areal_core.launchers.member import ASKED_TO_STOP, GUARDED_VARIABLE
from areal_core.launchers.places import GROUP_VARIABLE, PLACES_VARIABLE
from areal_core.messages import PeerClosed, frames
from areal_core.messages.hub import Finished, Stop, Welcome

LIMIT_S = 120.0
PROGRAM = """
import socket, sys, time
from areal_core.launchers.member import Member
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
        "import sys\nfrom areal_core.launchers.member import lose_lines_on_a_full_disk\n"
        "lose_lines_on_a_full_disk()\nprint('x' * 20_000)\nsys.stderr.write('waiting\\n')\nsys.stderr.flush()"
    )
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False).returncode == 0


JOINS = """
import os
from areal_core.launchers.member import join
join()
print(os.environ["NO_PROXY"], os.environ["no_proxy"], flush=True)
os._exit(0)
"""


def test_no_proxy_applies_to_this_machine_in_a_process_that_joins_a_run() -> None:
    """Everything that the process starts inherits the variables: agents, rewards, servers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        near = socket.create_connection(hub.getsockname())
        far, _ = hub.accept()
    frames.send(far, Welcome({"NO_PROXY": "intranet"}))
    variables = {
        GUARDED_VARIABLE: str(near.fileno()),
        GROUP_VARIABLE: "worker",
        PLACES_VARIABLE: json.dumps([[0, "worker-0", "", []]]),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "no_proxy": "",
    }
    with near, far:
        done = subprocess.run(
            [sys.executable, "-c", JOINS], env={**os.environ, **variables}, pass_fds=[near.fileno()],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    assert done.stdout.split() == ["intranet,localhost,127.0.0.1,::1"] * 2, done.stderr
