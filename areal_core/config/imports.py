"""Components named by import: `package.module:attribute` and `path/to/file.py:attribute`.

`areal_core.files` loads a file by its path. What is hashed for the run folder is what was executed.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import os
import typing
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from areal_core.config.problems import Problem, RejectedError, from_validation, rejected, unknown_key
from areal_core.errors import line_of
from areal_core.files import KeptSources, load_file
from areal_core.plugins.loading import describe_error

if typing.TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType


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
    if path.suffix != ".py":
        raise rejected(f"{path} does not end in .py", "write path/to/file.py:attribute")
    try:
        KeptSources.read(path)  # a file that cannot be read is reported as such, not as an error of its code
    except OSError as error:
        raise rejected(
            f"cannot read {path}: {error.strerror}", "a path is relative to the config that names it"
        ) from None
    try:
        return load_file(path)
    except (Exception, SystemExit) as error:
        raise rejected(
            f"importing {path} raises {describe_error(error)}{line_of(error)}", "correct the file"
        ) from error


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
