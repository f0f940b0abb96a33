"""The scratch folder of a member, on machines that give it no memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_core.launchers import guard
from areal_core.messages import private_folder


def test_scratch_is_in_memory_where_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MEMORY", tmp_path)
    assert guard.make_scratch().parent == tmp_path


@pytest.mark.parametrize("memory", ["missing", "a file", "full", "read-only"])
def test_scratch_is_a_temporary_folder_where_memory_takes_none(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    folders = {"missing": tmp_path / "missing", "a file": tmp_path / "file", "read-only": Path("/proc/self")}
    folders["a file"].touch()
    usage = os.statvfs(small_disk)
    (small_disk / "taken").write_bytes(bytes(usage.f_bavail * usage.f_frsize))
    monkeypatch.setattr(guard, "MEMORY", folders.get(memory, small_disk))
    with private_folder() as folder:  # its path is short
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        assert guard.make_scratch().parent == folder
    assert [path.name for path in small_disk.iterdir()] == ["taken"]


def test_scratch_is_where_the_path_of_a_socket_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts bytes, and a letter may have three."""
    folder = tmp_path / ("\u65e5" * 30)
    folder.mkdir()
    monkeypatch.setattr(guard, "MEMORY", tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    scratch = guard.make_scratch()
    assert scratch.parent == Path("/tmp")
    (scratch / guard._OWNER).unlink()
    scratch.rmdir()


STUCK = """
import os, signal, socket, sys
from areal_core.launchers import guard
from areal_core.messages import Credentials

def child():
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid

pids, hubs, guarded = [child(), child()], [], guard.Guard()
for index, pid in enumerate(pids):
    hub, own = socket.socketpair()
    hubs.append(hub)
    guarded.add(guard.Guarded(pid, own, "unix:/nowhere", Credentials(), "trainer", index, None, guard.Path("/nowhere")))
send, stuck = signal.pidfd_send_signal, next(iter(guarded._members))
signal.pidfd_send_signal = lambda pidfd, number: None if pidfd == stuck else send(pidfd, number)
hubs[0].close()
assert guarded.wait()[1] == {}, "nothing has ended"
os.kill(pids[1], signal.SIGTERM)
assert guarded.wait()[1] == {pids[1]: -signal.SIGTERM}, "the other member is guarded meanwhile"
os.kill(pids[0], signal.SIGKILL)
assert guarded.wait()[1] == {pids[0]: -signal.SIGKILL}, "and this one is, once it ends"
"""


def test_a_member_that_does_not_die_keeps_no_other_from_its_guard() -> None:
    """SIGKILL waits for an uninterruptible system call; here it is not sent."""
    subprocess.run([sys.executable, "-c", STUCK], check=True, timeout=120)
