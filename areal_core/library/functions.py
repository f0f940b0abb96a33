"""The names by which the processes of a run find the functions and classes that a call was given.

    defined at the top level of a file              -> `path/to/file.py:name`, or `package.module:name` if installed
    of a notebook, `python -c`, standard input,     -> pickled by cloudpickle into the folder `functions` of the run,
    or nested in another function                      `functions/name-DIGEST.py:name`

The small module beside each pickle has the SHA-256 of the pickle, and the function's source for people to read. A
resume compares the module as it compares any other file of the user. `load` refuses a pickle with another SHA-256.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from areal_core.disk import open_private
from areal_core.errors import ConfigError
from areal_core.files import KeptSources
from areal_core.runtime.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN: Final = (str, bytes, int, float, bool, type(None), tuple, list, dict, set, frozenset)
"""Types of global values that are shown with the source of a function that uses them."""
_MODULE: Final = '''"""`{name}` of the program that started this run, pickled by Python {python}. Its source:

{source}
"""

from areal_core.library.functions import load

{name} = load(__file__, python="{python}", sha256="{sha256}")
'''


def reference(target: Any, folder: Path) -> str:
    """Return the name of a function, class or other callable, as a config writes it.

    Args:
        target: the callable.
        folder: folder for the pickles of callables that no file has. It is made if it is needed.

    Raises:
        ConfigError: the callable cannot be pickled.
    """
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    name = getattr(target, "__qualname__", "")
    file = getattr(module, "__file__", None)
    if module is None or not file or not Path(file).is_file() or getattr(module, name, None) is not target:
        return _pickled(target, folder)
    if module.__name__ != "__main__" and _is_installed(module.__name__, Path(file)):
        return f"{module.__name__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def _is_installed(module: str, file: Path) -> bool:
    """Return whether every process finds a module by its name. The folder of the script is searched by it alone."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    own = {"", str(Path.cwd()), *([str(Path(script).resolve().parent)] if script else [])}
    spec = PathFinder.find_spec(module.partition(".")[0], [folder for folder in sys.path if folder not in own])
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin).resolve()
    return file.resolve() == origin or (
        spec.submodule_search_locations is not None and file.resolve().is_relative_to(origin.parent)
    )


def _pickled(target: Any, folder: Path) -> str:
    """Pickle a callable into a folder. Return the name of the module that loads it."""
    import cloudpickle

    shown = getattr(target, "__qualname__", type(target).__qualname__)
    name = re.sub(r"\W", "_", shown.rpartition(".")[2]).strip("_") or "function"
    name = f"function_{name}" if name[0].isdigit() or name == "lambda" else name
    try:
        data = cloudpickle.dumps(target)
    except Exception as error:
        raise ConfigError(
            f"{shown} cannot be pickled for the processes of the run: {type(error).__name__}: {error}",
            hints=[
                "it uses a value of this program that no other process can have, such as a lock or a connection: make "
                "that value inside of the function, or put both into a file",
            ],
        ) from error
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    source = "\n\n".join(_sources(target).values()).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    text = _MODULE.format(name=name, python=python, source=source, sha256=hashlib.sha256(data).hexdigest())
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    for private in (folder.parent, folder):  # the run folder and its functions are for their user only
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_private(path.with_suffix(".pickle"), "wb") as file:
        file.write(data)
    with open_private(path, "w", encoding="utf-8") as file:
        file.write(text)
    return f"{path.resolve()}:{name}"


def load(module_file: str, *, python: str, sha256: str) -> Any:
    """Return the callable that stands beside a module in the folder `functions` of a run.

    Args:
        module_file: file of the module.
        python: version of Python that wrote the pickle, such as "3.11".
        sha256: SHA-256 of the pickle in hexadecimal digits.

    Raises:
        ConfigError: this is another version of Python. A pickled function holds bytecode, which only its own version
            can execute. Or the pickle has changed since the run started.
    """
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    path = Path(module_file).with_suffix(".pickle")
    if own != python:
        raise ConfigError(
            f"{path.stem.rpartition('-')[0]} was pickled by Python {python}, and this is Python {own}, which cannot "
            f"execute its bytecode: resume the run with Python {python}, or put the function into a file"
        )
    if KeptSources.folder is not None:  # the run folder may have been moved since
        path = RunFolder(KeptSources.folder.parent).functions / path.name
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"{path} has changed since the run started: restore it, or start a new run")
    return pickle.loads(data)


def _sources(target: Any, known: dict[str, str] | None = None) -> dict[str, str]:
    """Return the source of a callable and of everything of its program that it uses, by name."""
    sources = {} if known is None else known
    shown = getattr(target, "__qualname__", type(target).__qualname__)
    if shown in sources:
        return sources
    sources[shown] = ""  # its place, in case it uses itself
    functions = list(_functions(target))
    sources[shown] = (
        _source_of(target) or "\n".join(map(_source_of, functions)) or f"(the source of {shown} is not known)"
    )
    for function in functions:
        for name, value in _used(function):
            is_own = callable(value) and getattr(value, "__module__", "") == function.__module__
            if is_own and not isinstance(value, ModuleType):
                _sources(value, sources)
            elif isinstance(value, _PLAIN):
                sources.setdefault(name, f"{name} = {value!r}")
    return sources


def _functions(target: Any) -> Iterator[FunctionType]:
    """Yield the functions of a callable: itself, the methods of a class, or what a partial or an object calls."""
    if isinstance(target, FunctionType):
        yield target
    elif isinstance(target, type):
        yield from (value for value in vars(target).values() if isinstance(value, FunctionType))
    elif callable(inner := getattr(target, "func", getattr(target, "__func__", None))):
        yield from _functions(inner)
    else:
        yield from _functions(type(target))


def _source_of(target: Any) -> str:
    """Return the source of a function or class, or nothing if it is not known, as with `python -c`."""
    with suppress(OSError, TypeError):
        return inspect.getsource(target)
    return ""


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a program's globals, and of enclosing functions, that a function uses."""
    codes = [function.__code__]
    for code in codes:
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the enclosing function has not assigned it yet
            yield name, cell.cell_contents
