"""Reads the settings of the user's own components: `read_settings` in the driver, the rest in a child process.

A component that is named by import has its settings in its signature, or in a `Config` class beside it. The driver
does not import it. A child does, validates the whole config with it, and writes `Reading` as JSON:

    driver    resolve                 settings as they were written, unread
    child     `read_in_child`         imports the components; validates; checks across sections
    driver    `Reading.apply`         raises the problems, with file and line, or adopts the values
    driver    config.yaml of the run  has the values as validated: absolute paths, numbers instead of texts

The child of a preflight does this first (`areal_core.checks.child`). `areal config` starts a child that does nothing
else, `python -m areal_core.checks.reading FOLDER [SOURCES]`, and stores its result: until the config, a file that the
import has read, or the environment changes, nothing is imported again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from pydantic_core import to_jsonable_python

from areal_core.background import start_thread
from areal_core.checks.memory import Memory, imported_files
from areal_core.checks.models import unread_problems
from areal_core.config import Settings, load_run, needs_of, selections
from areal_core.config.problems import Problem  # noqa: TC001 - msgspec reads the annotation
from areal_core.config.resolve import CONFIG_FILE, import_components
from areal_core.config.selection import AdoptedSettings, unread_selections
from areal_core.errors import ConfigError
from areal_core.files import KeptSources
from areal_core.interfaces.algorithm import ForwardPass
from areal_core.interfaces.launcher import describe_exit
from areal_core.interfaces.model import Role  # noqa: TC001 - msgspec reads the annotation
from areal_core.runtime.process_tree import adopt_orphans, end_descendants, end_session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from areal_core.config import Resolved, Selection

READING_FILE: Final = "reading.msgpack"
"""Name of the file that the child writes. Unlike JSON, its format has infinity, which settings may be."""
_DEADLINE_S: Final = 600.0
"""Seconds for a child: importing the components, trying them, and reading rows."""
_LOG_INTERVAL_S: Final = 15.0
"""Seconds between two lines about a child that is still working."""
_POLL_S: Final = 0.02
"""Seconds between polls of a child."""
_OF_THE_MACHINE: Final = ("/proc", "/sys", "/dev")
"""Folders whose files describe the machine or this process."""
_LAST_OUTPUT: Final = 800
"""Characters of the output of a child that failed, for its problem."""


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """The settings of one component, as the child has read them.

    Attributes:
        path: keys that lead to the component.
        values: as a YAML file has them.
        facts: plain attributes of the settings model, or of the function or class.
        roles: roles of the models that the component, or one below it, needs. Empty outside the algorithm.
    """

    path: list[str | int]
    values: dict[str, Any]
    facts: dict[str, Any]
    roles: list[Role]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the child reports about the settings of a config.

    Attributes:
        problems: of the whole config. With any, the rest is empty.
        notes: see `RunConfig.cross_notes`.
        settings: of the components that were unread.
        files: SHA-256 of every Python file that the config names, those in settings of unread components, too.
        plugins: names of the plugins that the config names.
        model_problems: what the settings that were unread refuse about models on this machine.
        dependencies: files and folders that the child has read; empty if the result must not be stored.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: list[ReadSettings] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    model_problems: list[str] = field(default_factory=list)
    dependencies: list[str] = field(default_factory=list)

    def apply(self, resolved: Resolved) -> None:
        """Fill the unread settings of the driver's config.

        Raises:
            ConfigError: the config has problems.
        """
        if self.problems:
            raise resolved.error(self.problems)
        read = {tuple(each.path): each for each in self.settings}
        for path, chosen in unread_selections(resolved.config):
            found = read[path]
            chosen.adopt(AdoptedSettings(found.values, found.facts, found.roles))
        resolved.files.update(self.files)
        resolved.plugins.add(self.plugins)
        resolved.config.plugins[:] = resolved.plugins.names


def read_settings(resolved: Resolved, *, checks_models: bool = False) -> list[str]:
    """Read the unread settings of a config in a child, or take them from the cache. Return the config's notes.

    Args:
        resolved: the config.
        checks_models: whether to let these settings check the models that are on this machine.

    Raises:
        ConfigError: settings are wrong, a component cannot be imported, or settings refuse a model.
    """
    if not unread_selections(resolved.config):
        return list(resolved.config.cross_notes())
    reading = _stored_or_new_reading(resolved)
    if checks_models and reading.model_problems:
        raise ConfigError("the run cannot start", problems=reading.model_problems, hints=list(reading.model_problems))
    return reading.notes


def _stored_or_new_reading(resolved: Resolved) -> Reading:
    """Return a reading from the cache or of a new child, and fill the config's settings with it."""
    text = resolved.to_yaml()
    memory = Memory("settings", text, os.environ.items())  # the user's code may read any variable
    stored = memory.read()
    if stored is not None:
        reading = msgspec.convert(stored, Reading)
        reading.apply(resolved)
        return reading
    started_at_ns = time.time_ns()
    with Child("areal_core.checks.reading", text) as child:
        reading = child.reading()
    reading.apply(resolved)
    paths = [Path(path) for path in reading.dependencies]
    # The child may have read a file as it was before a change.
    if paths and not any(_has_changed(path, started_at_ns) for path in paths):
        memory.write(replace(reading, dependencies=[]), paths)
    return reading


def _has_changed(path: Path, since_ns: int) -> bool:
    """Return whether a file was written at or after a time. A folder, and a file that is gone, is compared by state."""
    with suppress(OSError):
        return path.is_file() and path.stat().st_mtime_ns >= since_ns
    return True


def read_in_child(unread: Resolved) -> tuple[Resolved, Reading]:
    """Import the user's components of a config in this process. Return the config, and what the driver needs of it."""
    resolved, problems = import_components(unread)
    if problems:
        return unread, Reading(problems)
    chosen = dict(selections(resolved.config))
    paths = [path for path, _ in unread_selections(unread.config)]
    return resolved, Reading(
        notes=list(resolved.config.cross_notes()),
        settings=[_read(path, chosen[path], resolved) for path in paths],
        files=resolved.files,
        plugins=resolved.plugins.names,
        model_problems=list(unread_problems(resolved, paths)),
    )


def _read(path: Sequence[str | int], chosen: Selection, resolved: Resolved) -> ReadSettings:
    facts = _facts(type(chosen.settings) if isinstance(chosen.settings, Settings) else chosen.load())
    roles = []
    if path[0] == "algorithm":
        needs = needs_of(chosen, resolved.config.training.updates)
        roles = [need.role if isinstance(need, ForwardPass) else need for need in needs]
    return ReadSettings(list(path), to_jsonable_python(chosen.settings), facts, roles)


def _facts(declared: object) -> dict[str, bool | int | float | str]:
    """Return plain attributes by name: those of a class and its bases, or those that were set on a function."""
    owners = [owner for owner in declared.__mro__ if owner is not object] if isinstance(declared, type) else [declared]
    names = {name for owner in owners for name in getattr(owner, "__dict__", ())}
    values = {name: getattr(declared, name, None) for name in names if not name.startswith(("_", "model_"))}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


class Child:
    """A process that imports the code of a config. It works from the constructor on.

    Args:
        module: its main module, which gets a folder with the config as argument.
        config: the complete config as text.
    """

    def __init__(self, module: str, config: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="areal-check-")
        self.folder = Path(self._temporary.name)
        (self.folder / CONFIG_FILE).write_text(config, encoding="utf-8")
        sources = [str(KeptSources.folder)] if KeptSources.folder else []
        command = [sys.executable, "-m", module, str(self.folder), *sources]
        with (self.folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        self._started_at = self._logged_at = time.monotonic()

    def reading(self) -> Reading:
        """Wait until the child has read the settings.

        Raises:
            ConfigError: it failed.
        """
        path = self.folder / READING_FILE
        problem = self.wait(path.is_file)
        if path.is_file():
            return msgspec.msgpack.decode(path.read_bytes(), type=Reading)
        problem = problem or self.failure()
        raise ConfigError("the config cannot be checked", problems=[problem], hints=[problem])

    def wait(self, is_done: Callable[[], bool] = lambda: False) -> str:
        """Wait until the child has ended, or something else is done. Return a problem if this takes too long."""
        while self._process.poll() is None and not is_done():
            now = time.monotonic()
            if now - self._started_at > _DEADLINE_S:
                return f"checking the components took longer than {_DEADLINE_S:g} s: {self._last_output()}"
            if now - self._logged_at > _LOG_INTERVAL_S:
                self._logged_at = now
                with suppress(OSError):  # standard output is for results: `--dry-run --json` writes them there
                    sys.stderr.write(
                        f"still checking the components of the config, for {now - self._started_at:.0f} s\n"
                    )
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
        return ""

    @property
    def exit_code(self) -> int:
        """Exit code of the child, which has ended."""
        return self._process.wait()

    def failure(self) -> str:
        """Return the problem of a child that has ended without a result."""
        return f"checking the components {describe_exit(self.exit_code)}: {self._last_output() or 'with no output'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        end_session(self._process)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._temporary.cleanup()

    def _last_output(self) -> str:
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")[-_LAST_OUTPUT:].strip()


def write_reading(reading: Reading, folder: Path) -> None:
    """Write the file that the driver waits for."""
    fresh = folder / f".{READING_FILE}"
    fresh.write_bytes(msgspec.msgpack.encode(reading))
    fresh.replace(folder / READING_FILE)


def start_child(words: Sequence[str]) -> Path:
    """Prepare the process of a child. Return its folder.

    Args:
        words: the arguments of the process.
    """
    adopt_orphans()  # so that `end_descendants` and the driver find daemons, too
    folder = Path(words[0])
    driver = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123 - the code of the config finds an empty standard input
        os.dup2(nothing.fileno(), 0)
    start_thread(partial(_end_after, driver, folder), "end of the driver")
    if len(words) > 1:
        KeptSources.use(Path(words[1]), renews=True)
    return folder


def _end_after(driver: int, folder: Path) -> None:
    """End this process and remove its folder when the driver has ended, which holds the other end of a pipe."""
    os.read(driver, 1)
    end_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def end_child() -> None:
    """End this process and those that the imported code has started. Skip threads and exit handlers of that code."""
    end_descendants()
    os._exit(0)


_ASKING: Final = {
    "os.exec", "os.fork", "os.posix_spawn", "os.system", "socket.connect", "sqlite3.connect", "subprocess.Popen",
}  # fmt: skip
"""Events of an import that asks a server, a program or a database, whose answers cannot be compared."""


class _Watch:
    """Notes the files and folders that are read while the user's components are imported.

    Attributes:
        paths: of the files and folders.
        has_asked: whether the result may depend on more than files.
    """

    def __init__(self) -> None:
        self.paths: set[Path] = set()
        self.has_asked = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take one event; see `sys.addaudithook`."""
        if event in _ASKING:
            self.has_asked = True
        elif event in {"os.listdir", "os.scandir"} or (event == "open" and _only_reads(arguments)):
            place = arguments[0]
            if isinstance(place, str | bytes):
                self.paths.add(Path(os.fsdecode(place)).absolute())


def _only_reads(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY


def main(folder: Path) -> None:
    """Read the settings of the config in a folder."""
    watch = _Watch()
    sys.addaudithook(watch)
    _, reading = read_in_child(load_run(folder))
    if not watch.has_asked:
        # A file that is added beside a component may be imported in the place of an installed module of its name.
        neighbors = {Path(path).parent for path in reading.files}
        paths = {*imported_files(), *neighbors, *(path for path in watch.paths if path.suffix != ".pyc")}
        ignored = {folder, *map(Path, _OF_THE_MACHINE)}
        reading.dependencies.extend(str(path) for path in paths if not ignored & {path, *path.parents})
    write_reading(reading, folder)


if __name__ == "__main__":
    main(start_child(sys.argv[1:]))
    end_child()
