"""`api.md`: the public modules, the number of their names, and those names that are no interfaces."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from docstrings import INTERFACES, bases, described, exported, first_sentence, markdown

from areal_core import data, errors
from areal_core.data.trajectory import TOKEN_DTYPES
from areal_core.exports import PUBLIC_MODULES
from areal_testing import PUBLIC_MODULES as PUBLIC_MODULES_OF_TESTS
from areal_testing import fakes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

INTRODUCTION: Final = """# API

Plugins and programs may rely on these modules: on the names in their `__all__`, all of which are on this page or, for
modules with interfaces, on [Interfaces](interfaces.md). Everything else may change at any time.
[What is public](../extend/public.md) says how a public name changes."""
MODULES: Final = (errors, fakes)
"""They define their names themselves."""


def page() -> str:
    """The whole page."""
    public = [import_module(name) for name in (*PUBLIC_MODULES, *PUBLIC_MODULES_OF_TESTS)]
    interfaces = {module.__name__ for module in INTERFACES}
    parts = [INTRODUCTION, _table(public)]
    for package in (module for module in public if module.__name__ not in interfaces):
        parts.append(_heading(package))
        parts += [_columns()] if package is data else []
        names_of = {package.__name__: package.__all__} if package in MODULES else exported(package)
        for module, names in names_of.items():
            import_module(module)
            for name in names:
                parts += described(package, name, module)
        values = [getattr(package, name) for name in package.__all__]
        further = {base: None for value in values if inspect.isclass(value) for base in bases(value)}
        for base in (base for base in further if not _is_public(base, public)):
            parts += described(sys.modules[base.__module__], base.__name__, base.__module__)
    return "\n\n".join(parts)


def _is_public(value: type, public: Sequence[ModuleType]) -> bool:
    return any(getattr(module, value.__name__, None) is value for module in public if value.__name__ in module.__all__)


def _table(public: Sequence[ModuleType]) -> str:
    rows = ["| module | names | what it has |", "|---|---|---|"]
    rows += [f"| `{module.__name__}` | {len(module.__all__)} | {first_sentence(module)} |" for module in public]
    return "\n".join([*rows, f"| all | {sum(len(module.__all__) for module in public)} | |"])


def _heading(package: ModuleType) -> str:
    """Of the tutorials in docstrings the first paragraph: the pages have the rest."""
    text = inspect.getdoc(package) or ""
    return f"## Package `{package.__name__}`\n\n{markdown(text.split(chr(10) * 2)[0])}"


def _columns() -> str:
    rows = ["| field by token of every trajectory | dtype |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {dtype} |" for name, dtype in TOKEN_DTYPES.items())])
