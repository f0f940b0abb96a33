"""The launcher of examples/command_launcher.py passes the suite and runs, through a shell and through true ssh."""

from __future__ import annotations

import asyncio
import getpass
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_core.errors import RunError
from areal_core.launchers import Place, ProcessGroup
from areal_core.runtime.network import free_port
from areal_testing.conformance import LauncherSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from conftest import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "command_launcher.py"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def example() -> ModuleType:
    """The example's module, as nobody has installed it."""
    specification = importlib.util.spec_from_file_location("command_launcher", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class TestThroughAShell(LauncherSuite):
    """What stands for a remote host here is a session of its own."""

    nodes = 2
    command: ClassVar[list[str]] = ["setsid", "--wait", "sh", "-c"]

    def make(self) -> Any:
        hosts = {"localhost#0": 0, "localhost#1": 0}
        return example().CommandLauncher(hosts=hosts, host="127.0.0.1", command=self.command)

    def test_a_command_that_is_not_there_is_told(self) -> None:
        launcher = example().CommandLauncher(hosts={"a": 0}, host="127.0.0.1", command=["/no/such/ssh", "{host}"])
        with pytest.raises(RunError, match="/no/such/ssh cannot be started"):
            asyncio.run(launcher.start(ProcessGroup("x", "x", ["true"]), {0: Place("a")}, {}))


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Words that reach this machine through a server of this user's own."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no true ssh here: sshd is not installed (Debian: openssh-server openssh-client)")
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # the server of root insists on it
    options = {
        "ListenAddress": f"127.0.0.1:{port}", "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none", "StrictModes": "no", "UsePAM": "no", "PasswordAuthentication": "no",
        "PermitRootLogin": "yes", "MaxStartups": "100",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, (folder / "log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        known = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}"]
        user = ["-i", str(folder / "user"), "-l", getpass.getuser(), "-p", str(port)]
        yield ["ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR", *known, *user, "{host}"]
    finally:
        server.terminate()
        server.wait()


class TestThroughSsh(TestThroughAShell):
    """A true server of ssh on this machine."""

    @pytest.fixture(autouse=True)
    def _reach(self, ssh: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TestThroughSsh, "command", ssh)


def run_words(command: list[str]) -> list[str]:
    """Of `areal run` over two hosts."""
    return ["run", "run.yaml", "run_dir=run", f"launcher.type={EXAMPLE}:CommandLauncher", "launcher.host=127.0.0.1",
            "launcher.hosts={localhost#0: 0, localhost#1: 0}", f"launcher.command={json.dumps(command)}",
            "launcher.trainer_processes=2"]  # fmt: skip


def test_a_run_over_two_hosts_of_ssh(workplace: Workplace, ssh: list[str]) -> None:
    done = workplace.areal(*run_words(ssh))
    assert done.code == 0, done.err + done.out
    assert [line["step"] for line in workplace.metrics()] == [1, 2, 3, 4]
    assert workplace.areal("audit", "run").code == 0


def test_hosts_that_do_not_answer_are_told_with_the_words_of_ssh(workplace: Workplace) -> None:
    command = [sys.executable, "-c", "raise SystemExit('Permission denied (publickey)')"]
    done = workplace.areal(*run_words(command))
    assert done.code == 1, done.out
    assert "its command ended with exit code 1: Permission denied (publickey)" in done.err
