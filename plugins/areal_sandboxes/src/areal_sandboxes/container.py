"""A sandbox of docker or podman: each command in a new container."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from areal_core.config import public_environment
from areal_core.errors import ConfigError, RunError
from areal_core.sdk import SandboxResult
from areal_sandboxes.config import MEBIBYTE
from areal_sandboxes.plain import write_files
from areal_sandboxes.programs import found_program
from areal_sandboxes.request import Request
from areal_sandboxes.running import Watched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_sandboxes.config import ContainerSettings

FOLDER: Final = "/tmp/work"
GIVEN: Final = "/given"
BEGIN: Final = f'mkdir {FOLDER} && cd {FOLDER} && cp -R {GIVEN}/. . && exec "$@"'
"""What a container runs in front of the command: the image needs sh, mkdir and cp."""
NOBODY: Final = "65534:65534"
PROBE_S, REMOVAL_S = 60.0, 60.0
OWN_FAILURE: Final = 125
"""The exit code by which docker and podman say that they themselves have failed; a command may have it too."""


class Container:
    """Runs each command in a new container without network, of which only memory can be written.

    It holds against what a container holds against, with the machine's own kernel below it, unless `options` choose
    another runtime. A start takes some tenths of a second.

    Args:
        settings: image and limits.

    Raises:
        ConfigError: neither program is installed, it does not work, or the image is not there.
    """

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._places = asyncio.Semaphore(settings.places)
        self._program = tuple(settings.program or [found_program()])
        self._probe()

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """See `areal_core.sdk.Sandbox`."""
        settings = self._settings
        request = Request.checked(command, files, input_text, settings.disk_mib * MEBIBYTE)
        name = f"areal-{secrets.token_hex(8)}"
        async with self._places:
            with tempfile.TemporaryDirectory(prefix="areal-container-") as folder:
                write_files(Path(folder), request)
                for path in (Path(folder), *Path(folder).rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)  # for another user to read
                process = self._start([*self.words(name, folder), *request.words])
                watched = Watched(process, settings.output_bytes, request.input)
                limit = ""
                try:
                    limit = await watched.end(min(settings.time_s, timeout_s or settings.time_s))
                finally:
                    if limit or process.returncode:
                        await self._remove(name)
                if not watched.drain():
                    limit = limit or "output"
        code = process.returncode
        if code == OWN_FAILURE and not limit:
            raise RunError(f"{self._program[0]} could not run a container: {watched.error.strip()[-500:]}")
        return SandboxResult(code if code <= 128 else 128 - code, watched.output, watched.error, limit)

    def words(self, name: str, folder: str) -> list[str]:
        """In front of a command that is to run in a container of this name, with the files of a folder."""
        settings = self._settings
        memory = f"{settings.memory_mib}m"
        # Else podman makes further folders of no limited size that can be written.
        only_tmp = ["--read-only-tmpfs=false"] if Path(self._program[0]).name == "podman" else []
        variables = {"HOME": FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"} | settings.variables
        return [
            *(*self._program, "run", "--rm", "--interactive", "--init", "--name", name, "--pull=never"),
            *("--network", "none", "--read-only", *only_tmp, "--user", NOBODY, "--hostname", "sandbox"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--log-driver", "none"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", f"{settings.cores:g}"),
            *("--pids-limit", str(settings.processes), "--ulimit", "core=0:0", "--ulimit", "nofile=256:256"),
            *("--shm-size", "16m", "--tmpfs", f"/tmp:rw,nosuid,nodev,exec,size={settings.disk_mib}m,mode=1777"),
            *("--volume", f"{folder}:{GIVEN}:ro"),
            *(word for key, value in variables.items() for word in ("--env", f"{key}={value}")),
            *(*settings.options, "--entrypoint", "/bin/sh", settings.image, "-c", BEGIN, "sh"),
        ]

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=public_environment(),  # where the runtime is set up to hand on its own
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{self._program[0]} cannot be started any more: {error}") from error

    async def _remove(self, name: str) -> None:
        """End a container by its name, whether it has begun or not.

        Raises:
            RunError: it is there still.
        """
        for words in (["kill", name], ["rm", "--force", name]):  # podman's rm alone asks first, and waits
            command = [*self._program, *words]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=REMOVAL_S
            )
        if done.returncode and "no such container" not in done.stderr.lower():
            raise RunError(f"the container {name} of a sandbox cannot be ended: {done.stderr.strip()}")

    def _probe(self) -> None:
        name, image = f"areal-{secrets.token_hex(8)}", self._settings.image
        with tempfile.TemporaryDirectory(prefix="areal-container-") as folder:
            Path(folder).chmod(0o755)
            try:
                subprocess.run(
                    [*self.words(name, folder), "true"],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=True,
                    timeout=PROBE_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                said = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()
                raise ConfigError(
                    f"the sandbox container does not work on this machine: {said[-500:] or error}",
                    hints=(
                        f"is the image there? {' '.join(self._program)} pull {image}",
                        f"does the program work? {' '.join(self._program)} info",
                    ),
                ) from error
