"""Sandboxes for code that nobody has reviewed, such as code that the policy writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a command in a sandbox.

    Attributes:
        exit_code: exit code of the command; negative for the signal that killed it.
        output: standard output, truncated at the sandbox's limit.
        error: standard error, truncated in the same way.
        limit: limit that ended the command, such as "time" or "memory"; empty if none did.
    """

    exit_code: int
    output: str
    error: str
    limit: str = ""


class Sandbox(Protocol):
    """Runs commands that may be malicious. One object serves many episodes concurrently.

    The documentation of a sandbox has the attacks that it resists, and its settings have its limits. Its constructor
    raises `ConfigError` if the sandbox does not work on this machine.

    Example:
        >>> import asyncio
        >>> import subprocess
        >>> from areal_core.sdk import Sandbox, SandboxResult
        >>> class NoSandbox:  # shows the signature; it isolates nothing and takes no files
        ...     async def run(self, command, *, files=None, input_text="", timeout_s=None):
        ...         assert not files
        ...         options = {"input": input_text, "timeout": timeout_s, "capture_output": True, "text": True}
        ...         ended = await asyncio.to_thread(subprocess.run, command, **options)
        ...         return SandboxResult(ended.returncode, ended.stdout, ended.stderr)
        >>> sandbox: Sandbox = NoSandbox()
        >>> asyncio.run(sandbox.run(["cat"], input_text="hello"))
        SandboxResult(exit_code=0, output='hello', error='', limit='')
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run one command in a new sandbox. Afterwards, nothing that it started is left.

        Args:
            command: program and arguments. The program is looked up in the sandbox's PATH.
            files: texts to write, by their paths relative to the working folder of the command.
            input_text: standard input of the command.
            timeout_s: seconds until the command is killed, if this is less than the sandbox's setting.

        Raises:
            ValueError: a path leads out of the folder, or a text cannot be written.
            RunError: the sandbox does not work.
        """


class FolderSandbox(Sandbox, Protocol):
    """A sandbox whose commands can change folders of this machine: what one command writes, the next one finds.

    Example:
        >>> import asyncio
        >>> import subprocess
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from areal_core.sdk import FolderSandbox, SandboxResult
        >>> class NoSandbox:  # shows the signature; it isolates nothing
        ...     async def run_in(self, folders, command, *, files=None, input_text="", timeout_s=None):
        ...         assert not files
        ...         (folder,) = folders.values()
        ...         options = {"input": input_text, "timeout": timeout_s, "capture_output": True, "text": True}
        ...         ended = await asyncio.to_thread(subprocess.run, command, cwd=folder, **options)
        ...         return SandboxResult(ended.returncode, ended.stdout, ended.stderr)
        ...
        ...     async def run(self, command, *, files=None, input_text="", timeout_s=None):
        ...         with TemporaryDirectory() as folder:
        ...             folders = {"/app": Path(folder)}
        ...             return await self.run_in(folders, command, input_text=input_text, timeout_s=timeout_s)
        >>> sandbox: FolderSandbox = NoSandbox()
        >>> asyncio.run(sandbox.run(["pwd"])).exit_code
        0
    """

    async def run_in(
        self,
        folders: Mapping[str, Path],
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run one command in a new sandbox. Afterwards, no process that it started is left.

        The sandbox may give the folders to another user. It does not limit what a command writes to them.

        Args:
            folders: folders of this machine that the command may read and change, by their paths in the sandbox,
                such as `/app`.
            command: see `Sandbox.run`, as for the other arguments.
            files: texts to write, by their paths relative to the working folder of the command.
            input_text: standard input of the command.
            timeout_s: seconds until the command is killed, if this is less than the sandbox's setting.

        Raises:
            ValueError: a folder does not exist, its path in the sandbox is taken, or see `Sandbox.run`.
            RunError: the sandbox does not work.
        """
