"""Sandbox of Linux namespaces: each command runs in a new bubblewrap."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import ConfigError, RunError
from areal_core.sdk import SandboxResult
from areal_sandboxes.cgroups import Cgroups
from areal_sandboxes.config import MEBIBYTE
from areal_sandboxes.request import Request, sealed
from areal_sandboxes.running import GATE, Watched
from areal_sandboxes.system_calls import system_call_filter
from areal_sandboxes.walls import FOLDER, checked_folders, inner_command, limits, outer_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from areal_sandboxes.cgroups import Group
    from areal_sandboxes.config import BubblewrapSettings

PROBE_TIMEOUT_S: Final = 60.0
"""Seconds that the trial command may take when a sandbox is created."""
EXIT_TIMEOUT_S: Final = 30.0
"""Seconds that killed processes may take to exit."""
OWN_PROCESSES: Final = 8
"""Number of bubblewrap's own processes in a sandbox, which its cgroup counts too."""
BY_SIGNAL: Final[Mapping[int, str]] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "file"}
"""Name of the limit that ends a command with this signal."""
HINTS: Final = {
    "nknown option": "bubblewrap 0.8 or newer is needed: `bwrap --version`",
    "amespace": "allow user namespaces: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 "
    "(Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, also its own seccomp profile",
    "proc on": "a container that hides parts of /proc cannot hold another one: docker run --security-opt "
    "systempaths=unconfined",
    "setresuid": "this root cannot become another user: run areal as a user, or map the user 65534 into its namespace",
    "prlimit": "Linux 5.14 or newer is needed, which counts processes by namespace",
}
"""Hints by a part of bubblewrap's error message."""


class Bubblewrap:
    """Runs each command in new namespaces, which are destroyed when it ends.

    It protects the machine's files, network, other processes, environment and resources. It does not protect against
    code that exploits the kernel. docs/guides/sandbox.md has the limits.

    Args:
        settings: limits, and further paths that commands may read.

    Raises:
        ConfigError: bubblewrap does not work on this machine.
    """

    def __init__(self, settings: BubblewrapSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.slots)
        self._outer = outer_command(settings)
        self._inner = inner_command(settings)
        self._limits = limits(settings)
        self._filter = system_call_filter()
        self._cgroups = Cgroups.find() if settings.cgroup != "never" else None
        if self._cgroups is None and settings.cgroup == "required":
            raise ConfigError(
                "the sandbox bubblewrap cannot make a cgroup here to limit memory",
                hints=(
                    "run as root, or in a unit of systemd with Delegate=yes and DelegateSubgroup=",
                    "cgroup: where possible",
                ),
            )
        self._probe()

    @property
    def description(self) -> str:
        """Limits that are enforced on this machine, in one line."""
        settings = self._settings
        scope = "for all processes of a command (cgroup)" if self._cgroups else "for each process, no cgroup"
        calls = "filtered" if self._filter else "not filtered on this architecture"
        user = " as nobody" if self._outer else ""
        return f"works{user}; memory {settings.memory_mib} MiB {scope}; system calls {calls}"

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run a command; see `areal_core.sdk.Sandbox`. Further limits are "cpu", "file", "memory" and "output"."""
        return await self.run_in({}, command, files=files, input_text=input_text, timeout_s=timeout_s)

    async def run_in(
        self,
        folders: Mapping[str, Path],
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run a command that changes folders of this machine; see `areal_core.sdk.FolderSandbox`."""
        settings = self._settings
        bound = checked_folders(folders)
        request = Request.checked(command, files, input_text, settings.disk_mib * MEBIBYTE)
        time_s = min(settings.time_s, timeout_s or settings.time_s)
        async with self._slots:
            group = self._make_group()
            try:
                return await self._run(request, time_s, group, bound)
            finally:
                if group:
                    group.remove()

    def _make_group(self) -> Group | None:
        if self._cgroups is None:
            return None
        settings = self._settings
        try:
            return self._cgroups.make(settings.memory_mib * MEBIBYTE, settings.processes + OWN_PROCESSES)
        except OSError as error:
            raise RunError(f"the sandbox bubblewrap can no longer make a cgroup: {error}") from error

    async def _run(
        self, request: Request, time_s: float, group: Group | None, folders: Mapping[str, Path]
    ) -> SandboxResult:
        loop = asyncio.get_running_loop()
        status = Status(2 if self._outer else 1)
        try:
            process = self._start(request, status, group, folders)
            watched = Watched(process, self._settings.output_bytes, request.input, is_gated=True)
            loop.add_reader(status.reader, status.read)
            try:
                limit = await watched.end(time_s)
            finally:
                loop.remove_reader(status.reader)
                status.read()
                await status.wait_until_gone()
        finally:
            status.close()
        if not watched.drain():
            limit = limit or "output"
        code = -signal.SIGKILL if status.code is None else status.code
        if group and group.has_run_out():
            limit = limit or "memory"
        if status.code is None and not limit:
            raise RunError(
                f"the sandbox bubblewrap could not run {request.command[0]!r}: it exited with {process.returncode}; "
                f"the end of its error output: {watched.error.strip()[-500:] or 'nothing'}"
            )
        return SandboxResult(code, watched.output, watched.error, limit or BY_SIGNAL.get(-code, ""))

    def _start(
        self, request: Request, status: Status, group: Group | None, folders: Mapping[str, Path]
    ) -> subprocess.Popen[bytes]:
        with ExitStack() as stack:

            def open_sealed(content: bytes) -> int:
                descriptor = sealed(content)
                stack.callback(os.close, descriptor)
                return descriptor

            stack.callback(status.close_writers)
            descriptors = list(status.writers)
            outer, inner = (["--json-status-fd", str(writer)] for writer in descriptors)
            options = [*inner]
            for path, content in request.files.items():
                descriptors.append(open_sealed(content))
                options += ["--perms", "0644", "--file", str(descriptors[-1]), f"{FOLDER}/{path}"]
            if self._filter:
                descriptors.append(open_sealed(self._filter))
                options += ["--seccomp", str(descriptors[-1])]
            try:
                return subprocess.Popen(
                    [*(group.prefix if group else ()), *self._command(options, outer, folders), *request.command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={},  # the sandboxed code can read the environment of its namespace's first process
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"the sandbox bubblewrap can no longer be started: {error}") from error

    def _command(self, options: Sequence[str], outer_options: Sequence[str], folders: Mapping[str, Path]) -> list[str]:
        """Return the command line of bubblewrap up to the command that it runs."""
        outer, inner = self._outer, self._inner
        if folders:
            outer, inner = outer_command(self._settings, folders), inner_command(self._settings, folders)
        outer = [*outer[:1], *outer_options, *outer[1:]] if outer else []
        return [*outer, *inner, *options, "--", *GATE, *self._limits]

    def _probe(self) -> None:
        """Run Python once, with a child process, so that everything that does not work here fails now."""
        code, status = "import os; os.waitpid(os.fork() or os._exit(0), 0)", Status(1)
        with self._start(Request(("python3", "-c", code), {}, b""), status, None, {}) as process:
            try:
                error_text = process.communicate(b"\n", timeout=PROBE_TIMEOUT_S)[1].decode("utf-8", "replace").strip()
            except subprocess.TimeoutExpired:
                error_text = f"it did nothing within {PROBE_TIMEOUT_S:g} s"
                os.killpg(process.pid, signal.SIGKILL)
        status.close()
        if process.returncode:
            cause = error_text.splitlines()[-1] if error_text else f"it exited with {process.returncode}"
            hints = [hint for part, hint in HINTS.items() if part in error_text]
            raise ConfigError(
                f"the sandbox bubblewrap does not work on this machine: {cause}",
                hints=(*hints, "sandboxes/container is an alternative; docs/guides/sandbox.md lists what each needs"),
            )


class Status:
    """Reads the status of a sandbox from bubblewrap: its first process, and the exit code of the command.

    All processes of the sandbox die with its first one.

    Args:
        layers: number of nested bubblewraps. Each has its own writer, because it closes the one that it gets. The outer
            one starts first and ends last. A bubblewrap that fails reports no exit code; an outer one then reports
            the failure's.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.reader, writer = os.pipe()
        self.writers = (writer, os.dup(writer))
        os.set_blocking(self.reader, False)
        self._first: int | None = None
        self._text = b""
        self._codes: list[int] = []

    @property
    def code(self) -> int | None:
        """Exit code of the command, negative for a signal; None if it did not run or did not finish."""
        if len(self._codes) < self._layers:
            return None
        code = self._codes[0]
        return code if code <= 128 or code > 128 + signal.NSIG else 128 - code

    def read(self) -> None:
        """Read what bubblewrap has written so far."""
        with suppress(BlockingIOError):
            while data := os.read(self.reader, 4096):
                self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if "child-pid" in message and self._first is None:
                with suppress(ProcessLookupError):
                    self._first = os.pidfd_open(message["child-pid"])
            if "exit-code" in message:
                self._codes.append(message["exit-code"])

    async def wait_until_gone(self) -> None:
        """Wait until every process of the sandbox has exited. Call this after the sandbox was killed or has ended.

        Raises:
            RunError: they do not exit within `EXIT_TIMEOUT_S`.
        """
        if self._first is None:
            return
        poll = select.poll()
        poll.register(self._first, select.POLLIN)
        deadline = asyncio.get_running_loop().time() + EXIT_TIMEOUT_S
        while not poll.poll(0):
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(f"processes of a sandbox were killed but did not exit within {EXIT_TIMEOUT_S:g} s")
            await asyncio.sleep(0.001)

    def close_writers(self) -> None:
        """Close this process's copies of the writers, after bubblewrap has started."""
        for writer in self.writers:
            os.close(writer)

    def close(self) -> None:
        """Close the remaining descriptors."""
        os.close(self.reader)
        if self._first is not None:
            os.close(self._first)
