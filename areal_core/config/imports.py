"""Components named by import: `package.module:attribute` and `path/to/file.py:attribute`.

A file is loaded by its path, under a module name made of that path, so that every process that needs it gets the same
one and two files of the same name do not meet. What is hashed for the run folder is what was executed. It may import
the files beside it, as a script may: its folder comes last in the search path, so that it hides nothing installed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import typing
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from areal_core.config.problems import Problem, RejectedError, from_validation, rejected, unknown_key
from areal_core.errors import line_of
from areal_core.plugins.loading import describe_error

if typing.TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


MODULES = "modules"
"""Where a run keeps the user's modules that were imported, below its sources."""


class Located(str):
    """What may be the name of a component, with where it stands: the folder that a file is relative to, and the plugin
    in whose preset it stands, if it does."""

    __slots__ = ("folder", "plugin")
    folder: Path
    plugin: str

    def __new__(cls, text: str, folder: Path, plugin: str) -> Self:
        """The text itself; the place travels with it."""
        located = super().__new__(cls, text)
        located.folder, located.plugin = folder, plugin
        return located

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True)
class Imported:
    """What a reference led to: the object, the form that means the same anywhere, and the file if it is one."""

    value: Any
    target: str
    file: Path | None = None
    sha256: str = ""


class KeptSources:
    """The source files of a run as it started with them; processes of the run execute these, whatever becomes of the
    files themselves. Modules that are imported are read from where they are, and from the run's copies once they are
    gone; that they have changed is told by a resume.

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
    def read(cls, path: Path) -> bytes:
        """The source of a file, as it was when the run started; says so where it is another one now."""
        kept = None if cls.folder is None else cls.place(cls.folder, path)
        if kept is None or not kept.is_file() or (cls.renews and path.is_file()):
            return path.read_bytes()
        source = kept.read_bytes()
        if not path.is_file() or path.read_bytes() != source:
            sys.stderr.write(f"{path} has changed since the run started, which goes on with what it started with\n")
        return source


def is_import(reference: str) -> bool:
    """Whether a reference names code by import: those, and only those, have a colon."""
    return ":" in reference


def import_reference(reference: str, folder: Path) -> Imported:
    """Import what a reference names; `RejectedError` says what is wrong with it and how to write it."""
    location, _, attribute = reference.rpartition(":")
    if not location or not attribute.isidentifier():
        raise rejected(f"'{reference}' is no reference", "write package.module:attribute or path/to/file.py:attribute")
    if location.endswith(".py") or "/" in location:
        # Path.expanduser raises for a user who does not exist.
        path = (getattr(reference, "folder", folder) / os.path.expanduser(location)).resolve()  # noqa: PTH111
        module, digest = _load_file(path)
        return Imported(_attribute(module, attribute, str(path)), f"{path}:{attribute}", path, digest)
    return Imported(_attribute(_load_module(location), attribute, location), reference)


def keyword_parameters(target: Any, skip: int = 0) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters behind the first `skip` that can be given by name, and whether any other name is taken too."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    by_name = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name, any(each.kind is each.VAR_KEYWORD for each in parameters)


def check_keywords(target: Any, written: Mapping[str, Any], title: str, context: object) -> dict[str, Any]:
    """Validate settings against a signature; parameters that are not given stay open, the caller may supply them.

    `RejectedError` carries every mistake; `title` names the target in it, `context` is that of the validation.
    """
    parameters, takes_all = keyword_parameters(target)
    hints = _type_hints(target)
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for key, value in written.items():
        if key not in parameters and not takes_all:
            # What a function is handed when it is called is no setting: that has a default, or can only be named.
            named = [
                name
                for name, each in parameters.items()
                if each.default is not each.empty or each.kind is each.KEYWORD_ONLY or inspect.isclass(target)
            ]
            problems.append(unknown_key((key,), named, title))
            continue
        try:
            values[key] = _adapter(hints.get(key, Any)).validate_python(value, context=context)
        except ValidationError as error:
            problems.extend(problem.below((key,)) for problem in from_validation(error))
    if problems:
        raise RejectedError(problems)
    return values


def _load_file(path: Path) -> tuple[ModuleType, str]:
    try:
        source = KeptSources.read(path)
    except OSError as error:
        raise rejected(
            f"cannot read {path}: {error.strerror}", "a path is relative to the config that names it"
        ) from None
    digest = hashlib.sha256(source).hexdigest()
    name = f"areal_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__areal_sha256__", "") == digest:
        return loaded, digest
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__["__areal_sha256__"] = digest
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(len(sys.path) - (KeptSources.folder is not None), str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise rejected(
            f"importing {path} raises {describe_error(error)}{line_of(error)}", "correct the file"
        ) from error
    return module, digest


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            hint = f"install what contains it, or name a file: path/to/{name.rpartition('.')[2]}.py:attribute"
            raise rejected(f"there is no module named '{name}' in this environment", hint) from None
        raise rejected(f"importing {name} raises {describe_error(error)}{line_of(error)}", "correct it") from error


def _attribute(module: ModuleType, attribute: str, place: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    near = difflib.get_close_matches(attribute, names, n=1)
    hint = (
        f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(sorted(names)) or 'nothing that can be called'}"
    )
    raise rejected(f"{place} has no '{attribute}'", hint)


def _type_hints(target: Any) -> dict[str, Any]:
    """The annotations of a signature; names that exist only for type checkers leave it without any."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """A validator for one annotation; a type that pydantic does not know is checked by isinstance."""
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        with contextlib.suppress(PydanticSchemaGenerationError, PydanticUserError):
            return TypeAdapter(annotation, config=config)
    return TypeAdapter(Any)
