"""What a sandbox must do: run a command apart from everything, limit what it takes, and leave nothing of it behind."""

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
    """Set `component` and `settings`, or override `make`. What tests do is bounded, where a sandbox holds nothing too.

    Attributes:
        python: the interpreter in the sandbox.
        isolates: False for what runs trusted code as a plain process: it limits time and output alone.
        output_bytes: the most that comes back of a command's output.
        memory_mib: what a process can surely not have; at least what the settings allow.
        disk_mib: what files can surely not have.
        processes: more than there may be at a time.
        start_s: within which a command has surely begun.
        patience_s: for anything to happen.
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

    def test_a_command_is_given_its_files_and_its_input(self) -> None:
        """It starts in the folder that they lie in, and what it says and how it ends come back."""
        code = "import sys; print(open('a/b.txt').read(), input()); print('err é', file=sys.stderr); sys.exit(3)"
        result = self._python(code, files={"a/b.txt": "file é", "c": ""}, input_text="input é\n")
        assert result.output == "file é input é\n", f"the output is {result.output!r} ({result.error.strip()})"
        assert result.error == "err é\n", f"the error output is {result.error!r}"
        assert (result.exit_code, result.limit) == (3, ""), f"it ended with 3, and is told as {result}"

    def test_input_that_nobody_reads_does_no_harm(self) -> None:
        """However long it is."""
        result = self._python("print('done')", input_text="x" * (4 << 20))
        assert (result.output, result.exit_code) == ("done\n", 0), f"it is told as {result}"

    def test_input_can_be_read_once(self) -> None:
        """Code that runs afterwards does not find it again, say at the sandbox's own processes."""
        self._only_where_it_isolates()
        secret = secrets.token_hex(16)
        result = self._python(READS_AGAIN, input_text=secret)
        assert result.output.startswith(f"{len(secret)}\n"), f"the input could not be read: {result}"
        assert secret not in result.output, "the input was read a second time"

    def test_a_signal_is_told(self) -> None:
        """As a negative exit code."""
        result = self._python("import os; os.kill(os.getpid(), 11)")
        assert result.exit_code == -11, f"it ended by signal 11, and its exit code is {result.exit_code}"

    def test_a_program_that_is_not_there_is_told(self) -> None:
        """It is the command's error, and not the sandbox's."""
        result = self._run(["no-such-program-anywhere"])
        assert result.exit_code not in {0, None}, f"a program that is not there ended with {result.exit_code}"

    def test_what_cannot_be_given_is_refused(self) -> None:
        """Paths that lead out of the folder or are none, and texts that cannot be written: a `ValueError`."""
        for path in REFUSED_PATHS:
            self._refused(f"the path {path[:20]!r}", files={path: "x"})
        self._refused("a file and a folder of one name", files={"a": "x", "a/b": "x"})
        self._refused("a file with half a character", files={"a": "\ud800"})
        self._refused("an input with half a character", input_text="\ud800")

    def test_output_is_a_text_whatever_it_was(self) -> None:
        """Bytes that are none do not get in the way of what is."""
        result = self._python("import sys; sys.stdout.buffer.write(b'a\\xff\\x00b')")
        assert result.output.startswith("a"), f"the output is {result.output!r}"
        assert result.output.endswith("\0b"), f"the output is {result.output!r}"

    def test_output_is_limited(self) -> None:
        """What prints without end is ended, or cut; it costs no memory."""
        for stream in ("stdout", "stderr"):
            result = self._python(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
            most = max(len(result.output), len(result.error))
            assert result.limit in {"output", "time"}, (
                f"it printed without end, and is told as ended by no limit: {most}"
            )
            assert 0 < most <= self.output_bytes, f"{most} characters came back, and at most {self.output_bytes} may"

    def test_time_is_limited(self) -> None:
        """Also of what ignores every signal that can be ignored, and with what it printed before."""
        marker = secrets.token_hex(16)
        begin = time.monotonic()
        result = self._python(STUBBORN, marker, timeout_s=self.start_s)
        assert result.limit == "time", f"it slept for ever, and is told as {result}"
        assert result.output == "begun\n", f"what it printed before is lost: {result.output!r}"
        assert time.monotonic() - begin < self.patience_s, "the limit of time ends nothing"
        self._assert_none_left(marker, "its time was over")

    def test_nothing_is_left_of_a_command_that_has_ended(self) -> None:
        """Of processes that it has started, in whatever session, with whatever open."""
        self._only_where_it_isolates()
        marker = secrets.token_hex(16)
        result = self._python(DAEMON, marker)
        self._assert_none_left(marker, f"the command has ended with {result.exit_code}")

    def test_nothing_is_left_of_a_command_that_nobody_waits_for(self) -> None:
        """When `run` is cancelled, as with an episode that is given up."""
        marker = secrets.token_hex(16)

        async def work() -> None:
            command = [self.python, "-c", STUBBORN, marker]
            # The task is awaited below.
            running = asyncio.ensure_future(self.make().run(command))
            deadline = time.monotonic() + self.patience_s
            while not _processes_with(marker):
                assert time.monotonic() < deadline, "the command does not begin"
                await asyncio.sleep(0.05)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

        asyncio.run(work())
        self._assert_none_left(marker, "nobody waits for it")

    def test_commands_run_at_the_same_time_and_do_not_meet(self) -> None:
        """Each has its own files; what one has written no other one finds."""
        code = "import os, sys; print(sorted(os.listdir('.')), open('own').read()); open(sys.argv[1], 'w').write('x')"

        async def work() -> None:
            sandbox, runs = self.make(), range(6)
            results = await asyncio.gather(
                *(sandbox.run([self.python, "-c", code, f"left-{n}"], files={"own": str(n)}) for n in runs)
            )
            for number, result in zip(runs, results, strict=True):
                wanted = f"['own'] {number}\n"
                assert result.output == wanted, f"a command finds {result.output!r}, not {wanted!r} {result.error}"

        self._limited(work())

    def test_the_environment_is_clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing of this process's environment is in the command's; where it isolates, in nobody's that it can ask."""
        marker = secrets.token_hex(16)
        monkeypatch.setenv("CONFORMANCE_SECRET", marker)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            result = self._python(ENVIRONMENTS if self.isolates else "import os; print(dict(os.environ))")
            other.kill()
        assert "PATH" in result.output, f"the command could not say what its environment is: {result.error}"
        assert marker not in result.output, "the command has found a variable of the environment of this process"

    def test_files_of_this_machine_are_hidden(self, tmp_path: Path) -> None:
        """A run folder, a home."""
        self._only_where_it_isolates()
        secret = secrets.token_hex(16)
        for path in (tmp_path, *tmp_path.parents):
            if path.stat().st_uid == tmp_path.stat().st_uid and path.is_relative_to(tempfile.gettempdir()):
                path.chmod(path.stat().st_mode | 0o055)  # so that nothing but the sandbox hides it
        (tmp_path / "secret").write_text(secret)
        (tmp_path / "open").mkdir(mode=0o777)
        (tmp_path / "open").chmod(0o777)
        result = self._python(READS, str(tmp_path / "secret"))
        assert secret not in result.output, "the command has read a file of this machine"
        self._python(READS, str(tmp_path / "open" / "written"), "w")
        assert not list((tmp_path / "open").iterdir()), "the command has written to this machine"

    def test_nothing_can_be_reached_by_network(self) -> None:
        """Neither a port of this machine's loopback, nor a socket by name."""
        self._only_where_it_isolates()
        name = secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
            named.bind(f"\0{name}")
            named.listen()
            result = self._python(CONNECTS, str(server.getsockname()[1]), name)
        assert result.exit_code == 0, f"the command could not try: {result.error}"
        assert result.output == "", f"the command has {result.output.strip()}"

    def test_other_processes_cannot_be_killed(self) -> None:
        """Of this machine, by their numbers."""
        self._only_where_it_isolates()
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
            self._python(KILLS, str(other.pid))
            assert other.poll() is None, "the command has killed a process of this machine"
            other.kill()

    def test_processes_are_limited(self) -> None:
        """A program that forks without end comes to an end of it, and all that it has begun ends."""
        self._only_where_it_isolates()
        marker = secrets.token_hex(16)
        result = self._python(FORKS, str(self.processes), marker)
        forked = int(result.output or 0)
        assert forked < self.processes, f"{forked} processes of a command were there at a time"
        self._assert_none_left(marker, "the command has ended")

    def test_memory_is_limited(self) -> None:
        """A process cannot have more than the machine can spare."""
        self._only_where_it_isolates()
        result = self._python(ALLOCATES, str(self.memory_mib << 20))
        assert "all" not in result.output, f"a command had {self.memory_mib} MiB of memory"
        assert result.exit_code != 0, f"memory was refused, and it is told as {result}"

    def test_files_are_limited(self) -> None:
        """Wherever a command may write, and in all places together."""
        self._only_where_it_isolates()
        result = self._python(WRITES, str(self.disk_mib << 20))
        assert result.output or result.exit_code, f"the command could not try: {result.error}"
        written = int(result.output or 0) >> 20  # one that was ended, for files are memory, has not written it all
        assert written < self.disk_mib, f"a command has written {written} MiB"

    def _only_where_it_isolates(self) -> None:
        if not self.isolates:
            pytest.skip("a plain process is kept from nothing")

    def _python(self, code: str, *words: str, **options: Any) -> SandboxResult:
        return self._run([self.python, "-c", code, *words], **options)

    def _run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        async def work() -> SandboxResult:
            return await self.make().run(command, **options)

        return self._limited(work())

    def _limited(self, work: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(self.patience_s):
                return await work

        return asyncio.run(limited())

    def _refused(self, what: str, **options: Mapping[str, str] | str) -> None:
        try:
            result = self._run([self.python, "-c", "pass"], **options)
        except ValueError:
            return
        raise AssertionError(f"{what} was not refused by a ValueError: {result}")

    def _assert_none_left(self, marker: str, since: str) -> None:
        left = _processes_with(marker)
        for number in left:  # or each failure leaves some to this machine
            with suppress(ProcessLookupError):
                os.kill(number, 9)
        assert left == [], f"{since}, and {len(left)} of its processes are there"


def _processes_with(marker: str) -> list[int]:
    """Processes of this machine with a word in their command, but for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found
