"""A sandbox: where commands run. This one isolates nothing and suits commands that you trust.

Code of the policy must not reach your files, the network or other processes: start your container or virtual machine in
`TimedProcess._run`, and remove `isolates = False` from the tests. They then check what must not be possible.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from areal_core.plugins import register
from areal_core.sdk import SandboxResult
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@register("sandboxes")
class TimedProcess:
    """Run trusted commands as plain processes with a limit on time and on the size of files."""

    def __init__(
        self,
        time_s: Annotated[float, Field(gt=0, description="Maximum duration of a command, in seconds.")] = 10.0,
        file_kib: Annotated[
            int, Field(ge=1, le=1 << 20, description="Maximum size of an output and of a file that it writes, in KiB.")
        ] = 100,
    ) -> None:
        self._time_s = time_s
        self._file_kib = file_kib

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run a command in a folder of its own. A missing program is exit code 127, as in a shell.

        Raises:
            ValueError: a path leads out of the folder, or a text cannot be encoded.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            place = Path(name)
            write_files(place / "work", files or {})
            (place / "input").write_bytes(input_text.encode())
            time_s = min(self._time_s, timeout_s or self._time_s)
            exit_code, limit = await self._run(command, place, time_s)
            output, error = ((place / name).read_bytes() for name in ("output", "error"))
        if not limit and max(len(output), len(error)) >= self._file_kib << 10:
            limit = "output"
        return SandboxResult(exit_code, output.decode(errors="replace"), error.decode(errors="replace"), limit)

    async def _run(self, command: Sequence[str], place: Path, time_s: float) -> tuple[int, str]:
        """Return the exit code, and the limit that ended the command."""
        with ExitStack() as stack:
            read = stack.enter_context((place / "input").open("rb"))
            output, error = (stack.enter_context((place / name).open("wb")) for name in ("output", "error"))
            try:
                process = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", 'ulimit -f "$0" && exec "$@"', str(2 * self._file_kib)),  # blocks of 512 bytes
                    *command,
                    cwd=place / "work",
                    env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(place / "work")},
                    stdin=read,
                    stdout=output,
                    stderr=error,
                    start_new_session=True,
                )
            except OSError as reason:
                error.write(f"{command[0]}: {reason.strerror}\n".encode())
                return 127, ""
            try:
                await asyncio.wait_for(process.wait(), time_s)
                return await process.wait(), ""
            except TimeoutError:
                return -signal.SIGKILL, "time"
            finally:  # also when the episode is cancelled
                kill_group(process.pid)
                await process.wait()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files of a command.

    Raises:
        ValueError: a path leads out of the folder, or a text cannot be encoded.
    """
    folder.mkdir()
    for path, text in files.items():
        if path.startswith("/") or path.endswith("/") or ".." in Path(path).parts or "\0" in path:
            raise ValueError(f"{path!r} is no path of a file in the folder of the command")
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode())
        except OSError as error:
            raise ValueError(f"{path!r} cannot be written: {error.strerror}") from None


def kill_group(pid: int) -> None:
    """Kill a process and what it started, where they still run."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
