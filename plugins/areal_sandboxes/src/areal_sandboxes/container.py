"""Sandbox of docker or podman: each command runs in a new container."""

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
from areal_sandboxes.programs import installed_program
from areal_sandboxes.request import Request
from areal_sandboxes.running import Watched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_sandboxes.config import ContainerSettings

FOLDER: Final = "/tmp/work"
INPUT_FOLDER: Final = "/given"
BEGIN: Final = f'mkdir {FOLDER} && cd {FOLDER} && cp -R {INPUT_FOLDER}/. . && exec "$@"'
"""Shell script that a container runs in front of the command. It needs sh, mkdir and cp in the image."""
NOBODY: Final = "65534:65534"
PROBE_TIMEOUT_S: Final = 60.0
"""Seconds that the trial container may take when a sandbox is created."""
REMOVAL_TIMEOUT_S: Final = 60.0
"""Seconds that killing and removing a container may take, each."""
OWN_FAILURE: Final = 125
"""Exit code with which docker and podman report their own failures. A command can exit with it, too."""


class Container:
    """Runs each command in a new container without network. Its only writable files are in memory.

    It is as secure as containers are, on the machine's own kernel unless `options` choose another runtime. Starting a
    container takes some tenths of a second.

    Args:
        settings: image and limits.

    Raises:
        ConfigError: docker and podman are not installed or do not work, or the image has not been pulled.
    """

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.slots)
        self._program = tuple(settings.program or [installed_program()])
        self._probe()

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
        request = Request.checked(command, files, input_text, settings.disk_mib * MEBIBYTE)
        name = f"areal-{secrets.token_hex(8)}"
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="areal-container-") as folder:
                write_files(Path(folder), request)
                for path in (Path(folder), *Path(folder).rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)  # the container's user is another one
                process = self._start([*self.words(name, folder), *request.command])
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
        """Return the command line that runs a command, which the caller appends, in a new container.

        Args:
            name: name of the container.
            folder: folder whose files are copied to the command's working directory.
        """
        settings = self._settings
        memory = f"{settings.memory_mib}m"
        # Otherwise podman mounts further writable folders without a size limit.
        only_tmp = ["--read-only-tmpfs=false"] if Path(self._program[0]).name == "podman" else []
        variables = {"HOME": FOLDER, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"} | settings.variables
        return [
            *(*self._program, "run", "--rm", "--interactive", "--init", "--name", name, "--pull=never"),
            *("--network", "none", "--read-only", *only_tmp, "--user", NOBODY, "--hostname", "sandbox"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--log-driver", "none"),
            *("--memory", memory, "--memory-swap", memory, "--cpus", f"{settings.cores:g}"),
            *("--pids-limit", str(settings.processes), "--ulimit", "core=0:0", "--ulimit", "nofile=256:256"),
            *("--shm-size", "16m", "--tmpfs", f"/tmp:rw,nosuid,nodev,exec,size={settings.disk_mib}m,mode=1777"),
            *("--volume", f"{folder}:{INPUT_FOLDER}:ro"),
            *(word for key, value in variables.items() for word in ("--env", f"{key}={value}")),
            *(*settings.options, "--entrypoint", "/bin/sh", settings.image, "-c", BEGIN, "sh"),
        ]

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=public_environment(),  # docker may be configured to pass its environment on to containers
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{self._program[0]} can no longer be started: {error}") from error

    async def _remove(self, name: str) -> None:
        """Kill and remove a container by its name, whether it has started or not.

        Raises:
            RunError: it could not be removed.
        """
        for arguments in (["kill", name], ["rm", "--force", name]):  # podman's `rm` alone sends SIGTERM and waits
            command = [*self._program, *arguments]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=REMOVAL_TIMEOUT_S
            )
        if done.returncode and "no such container" not in done.stderr.lower():
            raise RunError(f"the container {name} of a sandbox cannot be removed: {done.stderr.strip()}")

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
                    timeout=PROBE_TIMEOUT_S,
                )
            except (OSError, subprocess.SubprocessError) as error:
                error_text = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip()
                raise ConfigError(
                    f"the sandbox container does not work on this machine: {error_text[-500:] or error}",
                    hints=(
                        f"check that the image is there: {' '.join(self._program)} pull {image}",
                        f"check that the program works: {' '.join(self._program)} info",
                    ),
                ) from error
