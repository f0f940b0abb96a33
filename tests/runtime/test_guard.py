"""The scratch folder of a member, on machines that give it no memory."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_core.runtime import guard
from areal_core.runtime.rpc import private_folder


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


GUARD_OF_TWO = """
import os, signal, socket, sys, time
from pathlib import Path
from areal_core.runtime.environment import MemberPlace
from areal_core.runtime.guard import Guard, Guarded
from areal_core.runtime.process_tree import adopt_orphans
from areal_core.runtime.rpc import Credentials

def start(index, work=signal.pause):
    hub, connection = socket.socketpair()
    hub.setblocking(False)
    place = MemberPlace("trainer", index, f"trainer-{index}", "", [])
    member = Guarded(place, "unix:/nowhere", Credentials(), connection, Path("/nowhere"), log=None)
    if not guard.fork(member):
        hub.close()
        work()
        os._exit(0)
    members[member.pid] = member
    return member.pid, hub

def is_open(hub):
    try:
        return hub.recv(1) != b""
    except BlockingIOError:
        return True

def codes(seconds):
    gone, deadline = [], time.monotonic() + seconds
    while not gone and time.monotonic() < deadline:
        _, gone = guard.wait()
    return {member.pid: member.code for member in gone}

adopt_orphans()
guard = Guard()
members = {}
"""

STUCK_MEMBER = """
(first, hub), (second, _) = start(0), start(1)
signal.pidfd_send_signal = lambda *_: None
hub.close()
assert guard.wait()[1] == [], "nothing has ended"
os.kill(second, signal.SIGTERM)
assert codes(60) == {second: -signal.SIGTERM}, "the other member is guarded all the same"
os.kill(first, signal.SIGKILL)
assert codes(60) == {first: -signal.SIGKILL}, "and this one is, once it ends"
"""

STUCK_ORPHAN = """
reader, writer = os.pipe()

def leave_an_orphan():
    orphan = os.fork()
    if orphan:
        os.write(writer, str(orphan).encode())
    else:
        os.setsid()
        signal.pause()

first, hub = start(0, leave_an_orphan)
orphan, kill = int(os.read(reader, 20)), os.kill

def kill_all_but_the_orphan(pid, number):
    if pid != orphan:
        kill(pid, number)

os.kill = kill_all_but_the_orphan
assert codes(1) == {}, "something is left of the first"
assert is_open(hub)
assert members[first].code == 0
send_signal = signal.pidfd_send_signal
signal.pidfd_send_signal = os.kill = lambda *_: sys.exit("the pid of the first may be another process's")
guard.send_signal(members[first], signal.SIGTERM)
signal.pidfd_send_signal, os.kill = send_signal, kill_all_but_the_orphan
second, other_hub = start(1)
guard.send_signal(members[second], signal.SIGTERM)
assert codes(60) == {second: -signal.SIGTERM}, "nothing is left of the second"
assert is_open(hub) and not is_open(other_hub)
kill(orphan, signal.SIGKILL)
assert codes(60) == {first: 0}, "nothing is left of the first any more"
assert not is_open(hub)
"""


@pytest.mark.parametrize("scenario", [STUCK_MEMBER, STUCK_ORPHAN], ids=["member", "orphan"])
def test_a_process_that_does_not_die_keeps_the_guard_from_no_other_member(scenario: str) -> None:
    """SIGKILL waits for an uninterruptible system call; here it is not sent."""
    subprocess.run([sys.executable, "-c", GUARD_OF_TWO + scenario], check=True, timeout=300)


OTHER_GUARD = """
import sys
from areal_core.runtime.guard import make_scratch
print(make_scratch(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_the_guards_of_a_run_are_found_by_its_token_until_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = secrets.token_hex(16)
    unreadable = tmp_path / "areal-scratch-of-another-user"
    (unreadable / guard._TOKEN).mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_GUARD, token], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        scratch = Path(process.stdout.readline().strip())
        assert (scratch / guard._TOKEN).stat().st_mode & 0o777 == 0o600
        assert guard.running_guards(token) == [process.pid]
        assert guard.running_guards(secrets.token_hex(16)) == []
        process.kill()
    assert guard.running_guards(token) == []
    shutil.rmtree(scratch)
