"""Public modules with a stub: their names are imported on first use, and old names warn.

The stub beside such a module lists its names, each with the module that defines it. Type checkers, editors and
this module read the same list. Importing a public module imports nothing else:

    sdk.pyi     from areal_core.interfaces.workflow import Reward as Reward

    sdk.py      __all__, __dir__, __getattr__ = from_stub(__name__, __file__)

A name that is renamed or moved stays for one minor version. `deprecated` says where it is now:

    from_stub(__name__, __file__, deprecated={"Want": "areal_core.servers.SlotRequest"})

A module without a stub writes `__getattr__ = deprecated_names(__name__, {...})`.
"""

from __future__ import annotations

import ast
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Exports = tuple[list[str], Callable[[], list[str]], Callable[[str], Any]]
    """`__all__`, `__dir__` and `__getattr__` of a module."""

PUBLIC_MODULES: Final = (
    "areal_core.library",
    "areal_core.trl",
    "areal_core.sdk",
    "areal_core.data",
    "areal_core.chat",
    "areal_core.config",
    "areal_core.plugins",
    "areal_core.errors",
    "areal_core.engines",
    "areal_core.models",
    "areal_core.servers",
    "areal_core.launchers",
    "areal_core.processes",
    "areal_core.programs",
)
"""The modules whose `__all__` is public. Everything else of areal_core may change at any time."""


def from_stub(module: str, file: str, *, deprecated: Mapping[str, str] | None = None) -> Exports:
    """Return `__all__`, `__dir__` and `__getattr__` of a module whose names are in the stub beside it.

    Args:
        module: the module's `__name__`.
        file: the module's `__file__`.
        deprecated: the full new name of each old name. Old names are not in `__all__`.

    Raises:
        FileNotFoundError: there is no stub.
    """
    origins = stub_names(Path(file).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name not in origins:
            return _renamed(module, deprecated or {}, name)
        value = getattr(import_module(origins[name]), name)
        setattr(sys.modules[module], name, value)  # the next use does not call this function
        return value

    return list(origins), lambda: sorted({*vars(sys.modules[module]), *origins}), get


def stub_names(stub: Path) -> dict[str, str]:
    """Return the names that a stub exports (`from a import B as B`), each with its module, in the stub's order."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names if alias.asname == alias.name}


def deprecated_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module. For an old name it warns and returns the new object.

    Args:
        module: the module's `__name__`.
        names: the full new name of each old name.
    """
    return lambda name: _renamed(module, names, name)


def renamed_method(cls: type, old: str, new: str) -> None:
    """If a class defines a method under its old name only, add it under the new name, with a `DeprecationWarning`."""
    if old in vars(cls) and new not in vars(cls):
        message = f"{cls.__qualname__}.{old} is deprecated and will be ignored in the next minor version: call it {new}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        setattr(cls, new, vars(cls)[old])


def _renamed(module: str, names: Mapping[str, str], name: str) -> Any:
    """Return the new object of an old name, with a `DeprecationWarning` at the line that uses it."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    message = f"{module}.{name} is deprecated and will be removed in the next minor version: use {names[name]}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    home, _, new = names[name].rpartition(".")
    return getattr(import_module(home), new)
