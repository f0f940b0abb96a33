"""A sandbox of Linux namespaces: each command in a new bubblewrap."""

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
from areal_sandboxes.walls import FOLDER, inner_words, limits, outer_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_sandboxes.cgroups import Group
    from areal_sandboxes.config import BubblewrapSettings

PROBE_S: Final = 60.0
GONE_S: Final = 30.0
"""For the kernel to end what it has been told to end."""
OWN_PROCESSES: Final = 8
"""Bubblewrap's own, which a cgroup counts too."""
BY_SIGNAL: Final[Mapping[int, str]] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "file"}
HINTS: Final = {
    "nknown option": "bubblewrap 0.8 or newer is needed: `bwrap --version`",
    "amespace": "allow user namespaces: sysctl user.max_user_namespaces=15000, kernel.unprivileged_userns_clone=1 "
    "(Debian), kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, also its own seccomp profile",
    "proc on": "a container that hides parts of /proc cannot hold another one: docker run --security-opt "
    "systempaths=unconfined",
    "setresuid": "this root can be no other user: run areal as a user, or give its namespace the user 65534",
    "prlimit": "Linux 5.14 or newer is needed, which counts processes by namespace",
}


class Bubblewrap:
    """Runs each command in namespaces of its own, which end with it.

    It holds against what a program can do to the machine's files, network, other processes, environment and
    resources; not against one that breaks the kernel. The README says what is limited how.

    Args:
        settings: limits, and what is shown.

    Raises:
        ConfigError: it does not work on this machine.
    """

    def __init__(self, settings: BubblewrapSettings) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.places)
        self._outer, self._inner, self._limits = outer_words(settings), inner_words(settings), limits(settings)
        self._filter = system_call_filter()
        self._cgroups = Cgroups.find() if settings.cgroup != "never" else None
        if self._cgroups is None and settings.cgroup == "required":
            raise ConfigError(
                "no cgroup can be made here in which the sandbox bubblewrap would limit memory",
                hints=(
                    "run as root, or in a unit of systemd with Delegate=yes and DelegateSubgroup=",
                    "cgroup: where possible",
                ),
            )
        self._probe()

    @property
    def description(self) -> str:
        """What holds on this machine, in a line."""
        settings = self._settings
        memory = f"{settings.memory_mib} MiB "
        memory += "for all processes of a command (cgroup)" if self._cgroups else "for each process, no cgroup"
        calls = "filtered" if self._filter else "not filtered on this architecture"
        return f"works{' as nobody' if self._outer else ''}; memory {memory}; system calls {calls}"

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """See `areal_core.sdk.Sandbox`; more limits are "cpu", "file", "memory" and "output"."""
        settings = self._settings
        request = Request.checked(command, files, input_text, settings.disk_mib * MEBIBYTE)
        time_s = min(settings.time_s, timeout_s or settings.time_s)
        async with self._places:
            group = self._make_group()
            try:
                return await self._run(request, time_s, group)
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
            raise RunError(f"the sandbox bubblewrap can make no cgroup any more: {error}") from error

    async def _run(self, request: Request, time_s: float, group: Group | None) -> SandboxResult:
        loop = asyncio.get_running_loop()
        status = Status(2 if self._outer else 1)
        try:
            process = self._start(request, status, group)
            watched = Watched(process, self._settings.output_bytes, request.input, is_gated=True)
            loop.add_reader(status.reader, status.read)
            try:
                limit = await watched.end(time_s)
            finally:
                loop.remove_reader(status.reader)
                status.read()
                await status.gone()
        finally:
            status.close()
        if not watched.drain():
            limit = limit or "output"
        code = -signal.SIGKILL if status.code is None else status.code
        if group and group.has_run_out():
            limit = limit or "memory"
        if status.code is None and not limit:
            raise RunError(
                f"the sandbox bubblewrap could not run {request.words[0]!r}: it ended with {process.returncode}, "
                f"and its last words are: {watched.error.strip()[-500:] or 'nothing'}"
            )
        return SandboxResult(code, watched.output, watched.error, limit or BY_SIGNAL.get(-code, ""))

    def _start(self, request: Request, status: Status, group: Group | None) -> subprocess.Popen[bytes]:
        with ExitStack() as opened:

            def given(content: bytes) -> int:
                descriptor = sealed(content)
                opened.callback(os.close, descriptor)
                return descriptor

            opened.callback(status.close_writers)
            passed = list(status.writers)
            outer, inner = (["--json-status-fd", str(writer)] for writer in passed)
            words = [*inner]
            for path, content in request.files.items():
                passed.append(given(content))
                words += ["--perms", "0644", "--file", str(passed[-1]), f"{FOLDER}/{path}"]
            if self._filter:
                passed.append(given(self._filter))
                words += ["--seccomp", str(passed[-1])]
            try:
                return subprocess.Popen(
                    [*(group.words if group else ()), *self._words(words, outer), *request.words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={},  # the first process within can be asked for its own
                    pass_fds=passed,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"the sandbox bubblewrap cannot be started any more: {error}") from error

    def _words(self, options: Sequence[str], outer_options: Sequence[str] = ()) -> list[str]:
        outer = [*self._outer[:1], *outer_options, *self._outer[1:]] if self._outer else []
        return [*outer, *self._inner, *options, "--", *GATE, *self._limits]

    def _probe(self) -> None:
        """Run Python once, with a child: all that does not work here shows at once."""
        code, status = "import os; os.waitpid(os.fork() or os._exit(0), 0)", Status(1)
        with self._start(Request(("python3", "-c", code), {}, b""), status, None) as process:
            try:
                said = process.communicate(b"\n", timeout=PROBE_S)[1].decode("utf-8", "replace").strip()
            except subprocess.TimeoutExpired:
                said = f"it did nothing within {PROBE_S:g} s"
                os.killpg(process.pid, signal.SIGKILL)
        status.close()
        if process.returncode:
            cause = said.splitlines()[-1] if said else f"it ended with {process.returncode}"
            hints = [hint for words, hint in HINTS.items() if words in said]
            raise ConfigError(
                f"the sandbox bubblewrap does not work on this machine: {cause}",
                hints=(*hints, "sandboxes/container is another one; docs/guides/rewards.md says what each needs"),
            )


class Status:
    """What bubblewrap tells of a sandbox: its first process, with which all others end, and how the command ended.

    Args:
        layers: bubblewraps, one within the other, each with one of the `writers`, for it closes its own. The outer one
            begins first and ends last; one that fails tells no exit code, and the other that of the failure.
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
        """The command's exit code, negative for a signal; None where it was not run, or not to its end."""
        if len(self._codes) < self._layers:
            return None
        code = self._codes[0]
        return code if code <= 128 or code > 128 + signal.NSIG else 128 - code

    def read(self) -> None:
        """Take in what is there."""
        with suppress(BlockingIOError):
            while data := os.read(self.reader, 4096):
                self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            if "child-pid" in told and self._first is None:
                with suppress(ProcessLookupError):
                    self._first = os.pidfd_open(told["child-pid"])
            if "exit-code" in told:
                self._codes.append(told["exit-code"])

    async def gone(self) -> None:
        """Wait until every process of the sandbox has ended, which the end of its owner has brought about.

        Raises:
            RunError: the kernel does not end them.
        """
        if self._first is None:
            return
        poll = select.poll()
        poll.register(self._first, select.POLLIN)
        deadline = asyncio.get_running_loop().time() + GONE_S
        while not poll.poll(0):
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(f"processes of a sandbox were killed and have not ended within {GONE_S:g} s")
            await asyncio.sleep(0.001)

    def close_writers(self) -> None:
        """In this process."""
        for writer in self.writers:
            os.close(writer)

    def close(self) -> None:
        """Once all is over."""
        os.close(self.reader)
        if self._first is not None:
            os.close(self._first)
