"""Read tasks of Harbor.

A task is a folder with `task.toml`, `instruction.md`, `environment/` and `tests/test.sh`. The tests write their reward
to /logs/verifier/reward.json, or to reward.txt; see harbor.models.task (version 0.26).
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from areal_agents.environments.rows import ListedRows
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from areal_agents.harbor.config import HarborDataSettings

BUILDS = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
"""Files of `environment/` that define a container."""
FOLDER = re.compile(r"/[a-z][a-z0-9_-]*")
SYSTEM = (
    "bin",
    "dev",
    "etc",
    "home",
    "lib",
    "lib32",
    "lib64",
    "logs",
    "opt",
    "proc",
    "root",
    "sbin",
    "sys",
    "tests",
    "tmp",
    "usr",
    "var",
    "work",
)
TAKEN = frozenset(f"/{name}" for name in SYSTEM)
"""Folders of the system, of its Python, and of the tests."""
WORKING_FOLDER = "/app"
"""Folder in which the policy works, unless the task names another one."""


class HarborTasks(ListedRows):
    """A `Dataset` of tasks: rows with the task's `name`, `folder`, `instruction`, `workdir`, `environment` and `tests`.

    Args:
        settings: where the tasks are, and which of them to take.

    Raises:
        RunError: there are no such tasks, or a task cannot be played in a sandbox.
    """

    def __init__(self, settings: HarborDataSettings) -> None:
        folders = sorted(path.parent for path in settings.path.rglob("task.toml"))
        if settings.tasks is not None:
            if missing := sorted(set(settings.tasks) - {folder.name for folder in folders}):
                raise RunError(f"{settings.path} has no tasks {', '.join(missing)}")
            folders = [folder for folder in folders if folder.name in settings.tasks]
        rows, problems = [], []
        for folder in folders:
            try:
                row, reasons = read_task(folder)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise RunError(f"the task {folder} cannot be read: {error}") from error
            if reasons:
                problems.append(f"{folder.name} {', '.join(reasons)}")
            else:
                rows.append(row)
        if problems and not settings.skip_unsupported:
            raise RunError(
                f"{len(problems)} of {len(folders)} tasks cannot be played in a sandbox: {'; '.join(problems[:20])}",
                hints=[
                    "skip_unsupported: true leaves them out",
                    "docs/guides/environments.md has the way to play tasks in containers",
                ],
            )
        last = None if settings.size is None else settings.first + settings.size
        rows = rows[settings.first : last]
        if not rows:
            raise RunError(f"{settings.path} has no task {settings.first} that can be played in a sandbox")
        super().__init__(rows)


def read_task(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the row of a task, and why a sandbox cannot play it.

    Args:
        folder: folder of the task.

    Raises:
        RunError: task.toml cannot be read.
    """
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}/task.toml cannot be read: {error}") from error
    problems = list(_problems(folder, config))
    if problems:
        return {}, problems
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    row = {
        "name": config.get("task", {}).get("name", folder.name),
        "folder": str(folder.resolve()),
        "instruction": (folder / "instruction.md").read_text(encoding="utf-8").strip(),
        "workdir": environment.get("workdir") or WORKING_FOLDER,
        "environment": environment.get("env", {}),
        "tests": {"environment": verifier.get("env", {}), "timeout_s": verifier.get("timeout_sec")},
    }
    return row, []


def _problems(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    workdir = environment.get("workdir") or WORKING_FOLDER
    variables = {**environment.get("env", {}), **verifier.get("env", {})}
    taken = [name for name, value in variables.items() if "${" in str(value)]
    builds = [name for name in BUILDS if (folder / "environment" / name).exists()]
    strange = [str(path.relative_to(folder)) for path in _copied(folder) if _is_strange(path, folder)]
    missing = [name for name in ("instruction.md", "tests/test.sh") if not (folder / name).is_file()]
    needed = [name for name in ("gpus", "mcp_servers", "healthcheck") if environment.get(name)]
    has_separate_tests = verifier.get("environment_mode", "shared") != "shared" or "environment" in verifier
    found = {
        f"needs the container image {environment.get('docker_image')}": environment.get("docker_image"),
        f"needs a container that environment/{' and '.join(builds)} defines": builds,
        "has several steps": config.get("steps") or (folder / "steps").is_dir(),
        f"needs {environment.get('os')}": environment.get("os", "linux") != "linux",
        f"has {', '.join(needed)}": needed,
        "has tests with an environment of their own": has_separate_tests,
        "collects artifacts for its tests": verifier.get("collect"),
        f"takes {', '.join(taken)} from the environment of this machine": taken,
        f"works in {workdir}, which a sandbox cannot give it": not FOLDER.fullmatch(workdir) or workdir in TAKEN,
        f"has {', '.join(strange[:5])}, which leads out of its folder or is no file": strange,
        f"has no {', '.join(missing)}": missing,
    }
    yield from (text for text, is_there in found.items() if is_there)


def _copied(folder: Path) -> Iterator[Path]:
    """Yield the paths that an episode gets a copy of."""
    for name in ("environment", "tests"):
        yield from (folder / name).rglob("*")


def _is_strange(path: Path, folder: Path) -> bool:
    """Return whether a path is a link out of the task, or neither a file nor a folder."""
    is_inside = path.resolve().is_relative_to(folder.resolve())
    return not is_inside or not (path.is_file() or path.is_dir())
