"""No sandbox: a plain process, for trusted code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.sdk import SandboxResult
from areal_sandboxes.request import Request
from areal_sandboxes.running import Watched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_sandboxes.config import NoneSettings

NOT_FOUND, NOT_RUN = 127, 126
"""Exit codes of shells for a program that does not exist, or cannot be executed."""


class PlainProcess:
    """Runs commands as the user who runs areal, without isolation.

    A command can read and write all files of that user and use the network. Processes that leave its process group
    outlive it. Time, output and environment are limited for convenience only.

    Args:
        settings: limits and environment.
    """

    def __init__(self, settings: NoneSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.slots)

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run a command; see `areal_core.sdk.Sandbox`."""
        settings = self._settings
        request = Request.checked(command, files, input_text)
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="areal-none-", ignore_cleanup_errors=True) as folder:
                write_files(Path(folder), request)
                try:
                    process = subprocess.Popen(
                        request.command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        cwd=folder,
                        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "LANG": "C.UTF-8"}
                        | settings.variables,
                        start_new_session=True,
                    )
                except OSError as error:
                    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
                    return SandboxResult(code, "", f"{request.command[0]}: {error.strerror}\n")
                watched = Watched(process, settings.output_bytes, request.input)
                limit = await watched.end(min(settings.time_s, timeout_s or settings.time_s))
                if not watched.drain():
                    limit = limit or "output"
                return SandboxResult(process.returncode, watched.output, watched.error, limit)


def write_files(folder: Path, request: Request) -> None:
    """Write the files of a request to a folder."""
    for path, content in request.files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
