"""Conformance suite of sandboxes: a command is isolated, its resources are limited, and no process is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.sdk import SandboxResult

REFUSED_PATHS = ("", ".", "..", "../x", "a/../../x", "/tmp/x", "a\0b", "a/", "x" * 300)
STUBBORN = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(600)
"""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(600)
    os._exit(0)
time.sleep(0.2)
print("done")
"""
FORKS = """
import os, sys, time
count = 0
try:
    while count < int(sys.argv[1]):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""
ALLOCATES = """
import sys
held, piece = [], 16 << 20
while len(held) * piece < int(sys.argv[1]):
    held.append(b"x" * piece)
print("all")
"""
WRITES = """
import os, sys
total, most = 0, int(sys.argv[1])
for folder in {".", "/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/run", os.path.expanduser("~")}:
    for number in range(1000):
        size = 0
        try:
            with open(os.path.join(folder, f"large-{number}"), "wb", buffering=0) as file:
                while total < most:
                    size += file.write(b"x" * (1 << 20))
                    total += 1 << 20
        except OSError:
            pass
        if total >= most or not size:
            break
print(total)
"""
READS = """
import sys
try:
    with open(*sys.argv[1:]) as file:
        print(file.read())
except OSError:
    pass
"""
ENVIRONMENTS = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path, errors="replace").read())
    except OSError:
        pass
"""
CONNECTS = """
import socket, sys
for family, address in ((socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), (socket.AF_UNIX, "\\0" + sys.argv[2])):
    try:
        with socket.socket(family) as connection:
            connection.settimeout(5)
            connection.connect(address)
            print("connected to", address)
    except OSError:
        pass
"""
READS_AGAIN = """
import glob, os, sys
print(len(sys.stdin.read()))
for path in glob.glob("/proc/[0-9]*/fd/0"):
    try:
        print(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1 << 16).decode())
    except OSError:
        pass
"""
KILLS = """
import os, signal, sys
try:
    os.kill(int(sys.argv[1]), signal.SIGKILL)
except OSError:
    pass
"""


class SandboxSuite(ComponentSuite):
    """Tests of a sandbox. Set `component` and `settings`, or override `make`.

    The programs of the tests bound what they take, so that a sandbox without limits harms nothing.

    Attributes:
        python: command of the interpreter in the sandbox.
        isolates: True if the sandbox isolates commands. Set False if it runs trusted code as a plain process, and only
            limits time and output.
        output_bytes: largest number of characters of a command's output.
        memory_mib: memory in MiB that no process may get. At least the limit of the settings.
        disk_mib: total size of files in MiB that no command may write.
        processes: number of concurrent processes that no command may have.
        start_s: seconds within which a command starts.
        patience_s: seconds after which a wait fails the test.
    """

    kind: ClassVar[str] = "sandboxes"
    python: ClassVar[str] = "python3"
    isolates: ClassVar[bool] = True
    output_bytes: ClassVar[int] = 1 << 20
    memory_mib: ClassVar[int] = 1536
    disk_mib: ClassVar[int] = 256
    processes: ClassVar[int] = 256
    start_s: ClassVar[float] = 3.0
    patience_s: ClassVar[float] = 120.0

    def test_a_command_gets_its_files_and_its_input(self) -> None:
        """A command starts in the folder with its files, and its output, error output and exit code are returned."""
        code = "import sys; print(open('a/b.txt').read(), input()); print('err é', file=sys.stderr); sys.exit(3)"
        result = self._python(code, files={"a/b.txt": "file é", "c": ""}, input_text="input é\n")
        assert result.output == "file é input é\n", f"the output is {result.output!r} ({result.error.strip()})"
        assert result.error == "err é\n", f"the error output is {result.error!r}"
        assert (result.exit_code, result.limit) == (3, ""), f"it ended with 3, but the result is {result}"

    def test_unread_input_does_no_harm(self) -> None:
        """A command that does not read its input of several MiB ends normally."""
        result = self._python("print('done')", input_text="x" * (4 << 20))
        assert (result.output, result.exit_code) == ("done\n", 0), f"the result is {result}"

    def test_input_can_be_read_once(self) -> None:
        """Code that runs later cannot read the input again, for example from the sandbox's own processes."""
        self._skip_unless_isolated()
        secret = secrets.token_hex(16)
        result = self._python(READS_AGAIN, input_text=secret)
        assert result.output.startswith(f"{len(secret)}\n"), f"the input could not be read: {result}"
        assert secret not in result.output, "the input was read a second time"

    def test_a_signal_is_a_negative_exit_code(self) -> None:
        """A command that a signal ends has the negative signal number as its exit code."""
        result = self._python("import os; os.kill(os.getpid(), 11)")
        assert result.exit_code == -11, f"it ended by signal 11, and its exit code is {result.exit_code}"

    def test_a_missing_program_fails_the_command(self) -> None:
        """A missing program gives a nonzero exit code. The sandbox raises no error."""
        result = self._run(["no-such-program-anywhere"])
        assert result.exit_code not in {0, None}, f"a missing program ended with {result.exit_code}"

    def test_invalid_files_and_input_are_refused(self) -> None:
        """The sandbox raises ValueError for invalid paths, paths that lead out of the folder, and unencodable text."""
        for path in REFUSED_PATHS:
            self._assert_refused(f"the path {path[:20]!r}", files={path: "x"})
        self._assert_refused("a file and a folder of one name", files={"a": "x", "a/b": "x"})
        self._assert_refused("a file with a lone surrogate", files={"a": "\ud800"})
        self._assert_refused("an input with a lone surrogate", input_text="\ud800")

    def test_output_is_always_a_string(self) -> None:
        """Bytes that are not text do not affect the rest of the output."""
        result = self._python("import sys; sys.stdout.buffer.write(b'a\\xff\\x00b')")
        assert result.output.startswith("a"), f"the output is {result.output!r}"
        assert result.output.endswith("\0b"), f"the output is {result.output!r}"

    def test_output_is_limited(self) -> None:
        """The sandbox ends a command that prints forever, or cuts its output. Memory use stays bounded."""
        for stream in ("stdout", "stderr"):
            result = self._python(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
            most = max(len(result.output), len(result.error))
            assert result.limit in {"output", "time"}, f"it printed forever, but the result names no limit: {most}"
            assert 0 < most <= self.output_bytes, f"{most} characters came back, but the limit is {self.output_bytes}"

    def test_time_is_limited(self) -> None:
        """The sandbox ends a command that ignores signals after its timeout, and returns its output until then."""
        marker = secrets.token_hex(16)
        begin = time.monotonic()
        result = self._python(STUBBORN, marker, timeout_s=self.start_s)
        assert result.limit == "time", f"it slept forever, but the result is {result}"
        assert result.output == "begun\n", f"its output before the timeout is lost: {result.output!r}"
        assert time.monotonic() - begin < self.patience_s, "the timeout did not end the command"
        self._assert_none_left(marker, "the command timed out")

    def test_an_ended_command_leaves_no_process(self) -> None:
        """The sandbox ends all processes of a command when it ends, also daemons in other sessions."""
        self._skip_unless_isolated()
        marker = secrets.token_hex(16)
        result = self._python(DAEMON, marker)
        self._assert_none_left(marker, f"the command ended with {result.exit_code}")

    def test_a_cancelled_command_leaves_no_process(self) -> None:
        """The sandbox ends the command if `run` is cancelled, as it is if an episode times out."""
        marker = secrets.token_hex(16)

        async def work() -> None:
            command = [self.python, "-c", STUBBORN, marker]
            # The task is awaited below.
            running = asyncio.ensure_future(self.make().run(command))
            deadline = time.monotonic() + self.patience_s
            while not _processes_with(marker):
                assert time.monotonic() < deadline, "the command did not start"
                await asyncio.sleep(0.05)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

        asyncio.run(work())
        self._assert_none_left(marker, "run was cancelled")

    def test_concurrent_commands_are_independent(self) -> None:
        """Each command has its own files. No command finds a file that another one has written."""
        code = "import os, sys; print(sorted(os.listdir('.')), open('own').read()); open(sys.argv[1], 'w').write('x')"

        async def work() -> None:
            sandbox, runs = self.make(), range(6)
            results = await asyncio.gather(
                *(sandbox.run([self.python, "-c", code, f"left-{n}"], files={"own": str(n)}) for n in runs)
            )
            for number, result in zip(runs, results, strict=True):
                expected = f"['own'] {number}\n"
                assert result.output == expected, f"a command finds {result.output!r}, not {expected!r} {result.error}"

        self._run_with_timeout(work())

    def test_the_environment_is_clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A command does not inherit this process's environment. If isolated, it cannot read that of any process."""
        marker = secrets.token_hex(16)
        monkeypatch.setenv("CONFORMANCE_SECRET", marker)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            result = self._python(ENVIRONMENTS if self.isolates else "import os; print(dict(os.environ))")
            other.kill()
        assert "PATH" in result.output, f"the command could not print its environment: {result.error}"
        assert marker not in result.output, "the command has found a variable of the environment of this process"

    def test_files_of_this_machine_are_hidden(self, tmp_path: Path) -> None:
        """A command cannot read or write files of this machine, such as a run folder or a home."""
        self._skip_unless_isolated()
        secret = secrets.token_hex(16)
        for path in (tmp_path, *tmp_path.parents):
            if path.stat().st_uid == tmp_path.stat().st_uid and path.is_relative_to(tempfile.gettempdir()):
                path.chmod(path.stat().st_mode | 0o055)  # so that only the sandbox hides it
        (tmp_path / "secret").write_text(secret)
        (tmp_path / "open").mkdir(mode=0o777)
        (tmp_path / "open").chmod(0o777)
        result = self._python(READS, str(tmp_path / "secret"))
        assert secret not in result.output, "the command has read a file of this machine"
        self._python(READS, str(tmp_path / "open" / "written"), "w")
        assert not list((tmp_path / "open").iterdir()), "the command has written to this machine"

    def test_the_network_is_unreachable(self) -> None:
        """A command cannot connect to a port of this machine, or to an abstract Unix socket."""
        self._skip_unless_isolated()
        name = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
            named.bind(f"\0{name}")
            named.listen()
            result = self._python(CONNECTS, str(server.getsockname()[1]), name)
        assert result.exit_code == 0, f"the command could not try: {result.error}"
        assert result.output == "", f"the command has {result.output.strip()}"

    def test_other_processes_cannot_be_killed(self) -> None:
        """A command cannot kill a process of this machine by its pid."""
        self._skip_unless_isolated()
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            self._python(KILLS, str(other.pid))
            assert other.poll() is None, "the command has killed a process of this machine"
            other.kill()

    def test_processes_are_limited(self) -> None:
        """A program that forks without end reaches the limit, and all of its processes end."""
        self._skip_unless_isolated()
        marker = secrets.token_hex(16)
        result = self._python(FORKS, str(self.processes), marker)
        forked = int(result.output or 0)
        assert forked < self.processes, f"{forked} processes of a command ran concurrently"
        self._assert_none_left(marker, "the command ended")

    def test_memory_is_limited(self) -> None:
        """A command cannot allocate more than its memory limit."""
        self._skip_unless_isolated()
        result = self._python(ALLOCATES, str(self.memory_mib << 20))
        assert "all" not in result.output, f"a command had {self.memory_mib} MiB of memory"
        assert result.exit_code != 0, f"memory was refused, but the result is {result}"

    def test_files_are_limited(self) -> None:
        """The total size of the files that a command writes is limited, wherever it may write."""
        self._skip_unless_isolated()
        result = self._python(WRITES, str(self.disk_mib << 20))
        assert result.output or result.exit_code, f"the command could not try: {result.error}"
        written = int(result.output or 0) >> 20  # a command that is killed (files may be memory) has printed nothing
        assert written < self.disk_mib, f"a command has written {written} MiB"

    def _skip_unless_isolated(self) -> None:
        if not self.isolates:
            pytest.skip("the sandbox runs a plain process, which isolates nothing")

    def _python(self, code: str, *arguments: str, **options: Any) -> SandboxResult:
        return self._run([self.python, "-c", code, *arguments], **options)

    def _run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        async def work() -> SandboxResult:
            return await self.make().run(command, **options)

        return self._run_with_timeout(work())

    def _run_with_timeout(self, work: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(self.patience_s):
                return await work

        return asyncio.run(limited())

    def _assert_refused(self, description: str, **options: Mapping[str, str] | str) -> None:
        try:
            result = self._run([self.python, "-c", "pass"], **options)
        except ValueError:
            return
        raise AssertionError(f"{description} was not refused with a ValueError: {result}")

    def _assert_none_left(self, marker: str, since: str) -> None:
        remaining = _processes_with(marker)
        for pid in remaining:  # a failed test must not leave them on this machine
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        assert remaining == [], f"{since}, but {len(remaining)} of its processes still exist"


def _processes_with(marker: str) -> list[int]:
    """Return the pids of processes of this machine with a word in their command. Zombies have no command."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
    return pids
