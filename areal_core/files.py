"""The user's own files as modules: `/home/me/task/reward.py` is `areal_core.files./home/me/task.reward`.

Each folder is a package. A file imports the files and packages beside it as a script does (`import helper`), or by
`from . import helper`, and two folders with a `helper.py` each get their own. Modules of Python's standard library keep
their names; a neighbor comes before an installed module of its name, for the files of its folder alone. A neighbor that
is itself installed (`pip install -e .`) is the installed module, so that its classes exist once.

The name of a module contains its path, so that every process can import it: one that unpickles an object of it, too.

A script that starts a run from Python needs no `if __name__ == "__main__":`. The processes of the run import the script
to find its functions, and execute it up to the call that starts the run: that call raises `ScriptStartsRun`.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import sys
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, partial
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

__path__: list[str] = []
"""Makes this module a package, whose modules `_Finder` finds."""

PREFIX: Final = f"{__name__}./"
"""Every module of the user's own files has a name that begins so."""
MODULES: Final = "modules"
"""Folder below a run's sources with the user's modules that were imported by their own names."""


def _current_folder() -> str | None:
    """Return the entry of `sys.path` for the folder that this process was started in; None if it is not searched."""
    with suppress(OSError):  # the folder was removed
        if sys.path[:1] in ([""], [str(Path.cwd())]):
            return sys.path[0]
    return None


CURRENT_FOLDER: Final = _current_folder()
"""Only processes that `python -m` started search this folder; all processes of a run must import the same module."""


class ScriptStartsRun(BaseException):
    """Raised by a call that would start a run in a file that is imported here for its functions.

    The import of the file ends there, with what is defined above the call. It is no `Exception`, so that
    `except Exception` in the script does not catch it.
    """


_importing: ContextVar[bool] = ContextVar("importing", default=False)


def is_importing_a_script() -> bool:
    """Return whether this code is executed by the import of one of the user's files, and not as a program."""
    return _importing.get()


class KeptSources:
    """The source files of a run as it started with them; processes of the run execute these, whatever becomes of the
    files themselves. Modules that are imported are read from where they are, and from the run's copies once they are
    gone. A resume reports which of them have changed.

    Attributes:
        folder: where they are kept; None in a process that belongs to no run.
        renews: whether files are read as they are now where they are still there, as a resume does to compare them.
    """

    folder: Path | None = None
    renews = False

    @classmethod
    def use(cls, folder: Path, *, renews: bool = False) -> None:
        """Read what is kept in a run's folder; modules that are gone are imported from there too, behind all others."""
        cls.folder, cls.renews = folder, renews
        sys.path.append(str(folder / MODULES))

    @classmethod
    def place(cls, folder: Path, path: Path, name: str = "") -> Path:
        """Where the source of a file is kept; `name` is `module NAME` of one that was imported, and leads there."""
        if module := name.partition("module ")[2]:
            above = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
            return folder.joinpath(MODULES, *above, path.name)
        return folder / f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.py"

    @classmethod
    def has(cls, path: Path) -> bool:
        """Return whether `read` finds a file."""
        return path.is_file() or (cls.folder is not None and cls.place(cls.folder, path).is_file())

    @classmethod
    def read(cls, path: Path) -> bytes:
        """Return the source of a file, as it was when the run started."""
        kept = None if cls.folder is None else cls.place(cls.folder, path)
        if kept is None or not kept.is_file() or (cls.renews and path.is_file()):
            return path.read_bytes()
        return kept.read_bytes()


def load_file(path: Path) -> tuple[ModuleType, str]:
    """Import a file. If it or another loaded file of its folder has changed since, all of them are imported again.

    Args:
        path: absolute and resolved; its name ends in `.py`.

    Returns:
        The module, and the SHA-256 of the source that was executed.
    """
    package = f"{__name__}.{_quote(str(path.parent))}"
    loaded = {name: module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.")}
    if any(map(_has_changed, loaded.values())):  # those that have not changed may hold parts of one that has
        for name in loaded:
            del sys.modules[name]
    module = importlib.import_module(f"{package}.{_quote(path.stem)}")
    return module, module.__dict__["__areal_sha256__"]


def changed_files() -> list[str]:
    """Return the user's files that this process has imported and that have another source now."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(PREFIX)]
    return sorted(str(module.__file__) for module in modules if _has_changed(module))


def _has_changed(module: ModuleType) -> bool:
    """Return whether a user's module would be executed from another source now."""
    executed, file = module.__dict__.get("__areal_sha256__"), Path(module.__file__ or "")
    return executed is not None and KeptSources.has(file) and _sha256(KeptSources.read(file)) != executed


def _sha256(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def _quote(part: str) -> str:
    """Return one part of a module's name: a dot would end it."""
    return part.replace("%", "%25").replace(".", "%2E")


class _Finder(MetaPathFinder):
    """Finds the module of a name that contains its path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        del path, target
        if not fullname.startswith(PREFIX):
            return None
        folder, *parts = map(unquote, fullname.removeprefix(f"{__name__}.").split("."))
        if not parts:
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [folder]
            return package
        place = Path(folder, *parts)
        file, package_file = place.with_name(f"{place.name}.py"), place / "__init__.py"
        if KeptSources.has(file):
            return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(file))
        if KeptSources.has(package_file):
            return importlib.util.spec_from_file_location(
                fullname, package_file, loader=_Loader(package_file), submodule_search_locations=[str(place)]
            )
        return PathFinder.find_spec(fullname, [str(place.parent)])  # compiled modules, folders without __init__.py


class _Loader(SourceLoader):
    """Executes a file that finds its neighbors."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def get_filename(self, fullname: str) -> str:
        """See `SourceLoader`."""
        del fullname
        return str(self._file)

    def get_data(self, path: str | bytes) -> bytes:
        """See `SourceLoader`."""
        return KeptSources.read(Path(str(path)))

    def exec_module(self, module: ModuleType) -> None:
        """See `SourceLoader`. Record the hash of the source that is executed."""
        source = KeptSources.read(self._file)
        if not self._file.is_file() or self._file.read_bytes() != source:
            sys.stderr.write(f"{self._file} has changed since the run started, which continues with its own copy\n")
        module.__dict__["__areal_sha256__"] = _sha256(source)
        folder = module.__name__.removeprefix(f"{__name__}.").partition(".")[0]
        importing = partial(_import_from, f"{__name__}.{folder}")
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
        outer = _importing.set(True)
        try:
            with suppress(ScriptStartsRun):  # what the script does next is for its own process
                exec(self.source_to_code(source, str(self._file)), module.__dict__)
        finally:
            _importing.reset(outer)


def _import_from(
    package: str,
    name: str,
    variables: Mapping[str, Any] | None = None,
    local: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """Do what an import statement does in a file of a package: as `__import__`, and neighbors come first."""
    first = name.partition(".")[0]
    if level or not _is_neighbor(package, first, variables or {}):
        return builtins.__import__(name, variables, local, names, level)
    module = importlib.import_module(f"{package}.{name}")
    if not names:
        return sys.modules[f"{package}.{first}"]
    return builtins.__import__(module.__name__, variables, local, names)


def _is_neighbor(package: str, name: str, importer: Mapping[str, Any]) -> bool:
    """Return whether a file means a file or package beside it by a name.

    A file never means itself: `wandb.py` that imports wandb means the installed one. A package does, in its own
    `__init__.py`.

    Args:
        package: of the folder.
        name: without dots.
        importer: the variables of the module that imports.
    """
    neighbor = f"{package}.{name}"
    if name in sys.stdlib_module_names or (importer.get("__name__") == neighbor and "__path__" not in importer):
        return False
    spec = importlib.util.find_spec(neighbor)
    if spec is None:
        return False
    if spec.origin is not None:
        return not _is_installed(name, spec.origin)
    # A folder without __init__.py may hold anything, such as the logs of wandb: an installed module comes before it.
    return name not in sys.modules and importlib.util.find_spec(name) is None


@cache
def _is_installed(name: str, file: str) -> bool:
    """Return whether every process finds a file by a name, as one of a package that `pip install -e .` installed."""
    folders = list(sys.path)
    if CURRENT_FOLDER in folders:
        folders.remove(CURRENT_FOLDER)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folders if finder is PathFinder else None)
        if spec is not None:
            return spec.origin is not None and Path(spec.origin).resolve() == Path(file).resolve()
    return False


sys.meta_path.insert(0, _Finder())  # before `PathFinder`, which would find the same files without their neighbors
