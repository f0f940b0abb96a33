"""Find and import components named by import: `package.module:attribute` and `path/to/file.py:attribute`.

    find_reference     Finds the file, its hash and the attribute without an import, while a config is read.
    import_reference   Imports the component, in the processes that use it and in the child of the preflight.
    check_keywords     Validates settings against the signature of an imported component.
    signature_schema   Describes the settings of a signature as a JSON schema.

`areal_core.files` loads a file by its path.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import to_jsonable_python

from areal_core.config.problems import Problem, RejectedError, from_validation, rejected, unknown_key
from areal_core.config.settings import takes_only_numbers
from areal_core.errors import line_of
from areal_core.files import KeptSources, load_file
from areal_core.plugins.loading import describe_error

if typing.TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

PRESET_NAMES: typing.Final = "preset_names"
"""Key of a complete config with unread settings: the plugin of each bare name in them that comes from its preset, by
dotted path. A bare name in a preset means a component of this plugin, even if another plugin has one, too."""
_DYNAMIC: typing.Final = {"__dict__", "__getattr__", "exec", "globals", "locals", "setattr", "vars", "modules"}
"""Names with which a file can define further names during its import. Its source does not show the further names."""


class Located(str):
    """A text from a config that may name a component, with its origin.

    Attributes:
        folder: folder that the path of a file is relative to.
        plugin: plugin whose preset contains the text; empty for any other origin.
    """

    __slots__ = ("folder", "plugin")
    folder: Path
    plugin: str

    def __new__(cls, text: str, folder: Path, plugin: str) -> Self:
        """Return the text with its origin attached."""
        located = super().__new__(cls, text)
        located.folder, located.plugin = folder, plugin
        return located

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def restore_presets(values: dict[str, Any], folder: Path) -> None:
    """Take `PRESET_NAMES` out of a file's values, and give the names that it lists their origin."""
    names = values.pop(PRESET_NAMES, None)
    for path, plugin in names.items() if isinstance(names, dict) else ():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        with contextlib.suppress(KeyError, IndexError, TypeError):  # a person has edited the file
            holder: Any = values
            for part in parents:
                holder = holder[part]
            holder[last] = Located(holder[last], folder, plugin)


@dataclass(frozen=True)
class Reference:
    """A component that a config names by import.

    Attributes:
        target: the import with an absolute path, which means the same in every process.
        file: the Python file; None for a module.
        sha256: hash of the file; empty for a module.
    """

    target: str
    file: Path | None = None
    sha256: str = ""


@dataclass(frozen=True)
class Imported(Reference):
    """An imported component.

    Attributes:
        value: the class or function.
        sha256: hash of the source that was executed.
    """

    value: Any = None


def is_import(reference: str) -> bool:
    """Return whether a reference names code by import. Only these references have a colon."""
    return ":" in reference


def find_reference(reference: str, folder: Path) -> Reference:
    """Find the code that a reference names, without an import.

    The source of a file shows whether it defines the attribute. A file that may define names during its import is
    accepted, and so is every attribute of a module: only the import shows whether they exist.

    Raises:
        RejectedError: the file, the attribute or the package does not exist.
    """
    path, location, attribute = _split(reference, folder)
    if path is None:
        package = location.partition(".")[0]
        if package.isidentifier() and package not in sys.modules and importlib.util.find_spec(package) is None:
            raise _no_module(location)
        return Reference(reference)
    source = _read(path)
    defined = _defined_names(source)
    if defined is not None and attribute not in defined:
        raise _no_attribute(str(path), attribute, [name for name, is_code in defined.items() if is_code])
    return Reference(f"{path}:{attribute}", path, hashlib.sha256(source).hexdigest())


def import_reference(reference: str, folder: Path) -> Imported:
    """Import the code that a reference names.

    Raises:
        RejectedError: the import fails, or the attribute does not exist. Hints show how to correct the reference.
    """
    path, location, attribute = _split(reference, folder)
    if path is None:
        return Imported(reference, value=_attribute(_load_module(location), attribute, location))
    module, digest = _load_file(path)
    return Imported(f"{path}:{attribute}", path, digest, _attribute(module, attribute, str(path)))


def absolute_reference(text: str) -> str:
    """Return a `Located` reference to a file with an absolute path. Return any other text as it is."""
    if not isinstance(text, Located) or not is_import(text):
        return text
    path, _, attribute = _split(text, text.folder)
    return f"{path}:{attribute}" if path is not None and path.is_file() else text


def _split(reference: str, folder: Path) -> tuple[Path | None, str, str]:
    """Return the file of a reference (None for a module), the file or module as written, and the attribute."""
    location, _, attribute = reference.rpartition(":")
    if not location or not attribute.isidentifier():
        raise rejected(f"'{reference}' is no reference", "write package.module:attribute or path/to/file.py:attribute")
    if not location.endswith(".py") and "/" not in location:
        return None, location, attribute
    # `os.path.expanduser`, because `Path.expanduser` raises if the user does not exist.
    path = (getattr(reference, "folder", folder) / os.path.expanduser(location)).resolve()  # noqa: PTH111
    return path, location, attribute


def keyword_parameters(target: Any, skip: int = 0) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters after the first `skip` that can be passed by name, and whether there is a `**kwargs`."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    by_name = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return by_name, any(each.kind is each.VAR_KEYWORD for each in parameters)


def check_keywords(
    target: Any,
    written: Mapping[str, Any],
    title: str,
    context: object,
    *,
    is_called_by_name: bool = False,
    is_complete: bool = False,
) -> dict[str, Any]:
    """Validate settings against the signature of a function or class, and return them.

    Args:
        target: the function or class.
        written: the settings.
        title: name of the target in errors.
        context: context of the validation.
        is_called_by_name: whether areal supplies arguments by their names, as those of a row to a reward. Then only
            parameters that have a default or must be named are settings.
        is_complete: whether areal passes no other arguments to a class, and none by keyword to a function. Then a
            setting without a default is required.

    Raises:
        RejectedError: it has every problem.
    """
    parameters, takes_all = keyword_parameters(target)
    hints = _type_hints(target)
    settings = [name for name, each in parameters.items() if _is_setting(target, each)]
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for key, value in written.items():
        if is_called_by_name and key in parameters and key not in settings:
            message = f"'{key}' is an argument of {title} that areal or the row supplies, and no setting"
            problems.append(Problem((key,), message, ("give it a default in the function to make it a setting",)))
            continue
        if key not in parameters and not takes_all:
            problems.append(unknown_key((key,), settings, title))
            continue
        hint = hints.get(key, Any)
        if isinstance(value, bool) and takes_only_numbers(hint):
            problems.append(Problem((key,), f"must be a number, not {str(value).lower()}"))
            continue
        try:
            values[key] = _adapter(hint).validate_python(value, context=context)
        except ValidationError as error:
            problems.extend(problem.below((key,)) for problem in from_validation(error))
    for name in settings if is_complete else ():
        if name not in written and parameters[name].default is inspect.Parameter.empty:
            problems.append(Problem((name,), f"is required by {title}"))
    if problems:
        raise RejectedError(problems)
    return values


def _is_setting(target: Any, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter can be set. A function gets the others from areal when it is called."""
    has_default = parameter.default is not parameter.empty
    return has_default or parameter.kind is parameter.KEYWORD_ONLY or inspect.isclass(target)


def _read(path: Path) -> bytes:
    """Return the source of a file. Raise `RejectedError` if the file cannot be read: its code is not at fault."""
    if path.suffix != ".py":
        raise rejected(f"{path} does not end in .py", "write path/to/file.py:attribute")
    try:
        return KeptSources.read(path)
    except OSError as error:
        raise rejected(
            f"cannot read {path}: {error.strerror}", "a path is relative to the config that names it"
        ) from None


def _load_file(path: Path) -> tuple[types.ModuleType, str]:
    _read(path)
    try:
        return load_file(path)
    except (Exception, SystemExit) as error:
        raise rejected(
            f"importing {path} raises {describe_error(error)}{line_of(error)}", "correct the file"
        ) from error


def _load_module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            raise _no_module(name) from None
        raise rejected(f"importing {name} raises {describe_error(error)}{line_of(error)}", "correct it") from error


def _no_module(name: str) -> RejectedError:
    hint = f"install what contains it, or name a file: path/to/{name.rpartition('.')[2]}.py:attribute"
    return rejected(f"there is no module named '{name}' in this environment", hint)


def _attribute(module: types.ModuleType, attribute: str, place: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    raise _no_attribute(place, attribute, [name for name, value in vars(module).items() if callable(value)])


def _no_attribute(place: str, attribute: str, code: Iterable[str]) -> RejectedError:
    """Return the error for an attribute that does not exist. `code` has the names of the classes and functions."""
    names = [name for name in code if not name.startswith("_")]
    near = difflib.get_close_matches(attribute, names, n=1)
    hint = (
        f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(sorted(names)) or 'nothing that can be called'}"
    )
    return rejected(f"{place} has no '{attribute}'", hint)


@functools.lru_cache(maxsize=64)
def _defined_names(source: bytes) -> dict[str, bool] | None:
    """Return the names that a file defines, and for each whether it is a class or function.

    Return None if the source does not show all names: it imports `*`, uses a name in `_DYNAMIC`, or has a syntax error.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # the import reports it
        return None
    names: dict[str, bool] = {}
    for node in _walk_statements(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = True
            case ast.Name(ctx=ast.Store()):
                names.setdefault(node.id, False)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                names.setdefault(name, False)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name.partition(".")[0], False)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(dict.fromkeys(node.names, False))
        identifiers = (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
        if "*" in identifiers or not _DYNAMIC.isdisjoint(identifiers):
            return None
    return names


def _walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, except those inside functions and classes, whose names are local."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _walk_statements(child)


def _type_hints(target: Any) -> dict[str, Any]:
    """Return the annotations of a signature, without those that name what only type checkers import."""
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        target = target.__init__
    elif not inspect.isroutine(target):
        target = type(target).__call__
    function = inspect.unwrap(target)
    hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError):
            names = getattr(function, "__globals__", {})
            hints |= typing.get_type_hints(alone, globalns=names, include_extras=True)
    return hints


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """Return a validator for one annotation. It checks a type that pydantic does not know with `isinstance`."""
    for config in (None, ConfigDict(arbitrary_types_allowed=True)):
        with contextlib.suppress(PydanticSchemaGenerationError, PydanticUserError):
            return TypeAdapter(annotation, config=config)
    return TypeAdapter(Any)


def signature_schema(target: Any, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of the settings in a signature, for `areal plugins` and for editors.

    The schema leaves out a function's positional parameters without a default, because areal supplies them.

    Args:
        target: the function or class.
        supplied: names of further parameters that areal supplies.
    """
    parameters, takes_all = keyword_parameters(target)
    hints = _type_hints(target)
    properties: dict[str, Any] = {}
    required = []
    for name, each in parameters.items():
        is_optional = each.default is not each.empty
        if name in supplied or not _is_setting(target, each):
            continue
        with contextlib.suppress(PydanticUserError):  # a type that no schema describes
            properties[name] = _adapter(hints.get(name, Any)).json_schema()
        part = properties.setdefault(name, {})
        if is_optional:
            part["default"] = to_jsonable_python(each.default, fallback=repr)
        else:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": takes_all}
