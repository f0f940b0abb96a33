"""`api.md`: the public names of areal_core that are no interfaces."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Final

from docstrings import bases, described, exported, markdown

from areal_core import config, data, library, plugins, trl
from areal_core.data.trajectory import TOKEN_DTYPES
from areal_core.testing import conformance, fakes

if TYPE_CHECKING:
    from types import ModuleType

INTRODUCTION: Final = """# API

The public names of areal's packages beside the [interfaces](interfaces.md)."""
PACKAGES: Final = (library, trl, data, config, plugins, conformance)
MODULES: Final = (fakes,)
"""They have no `__all__`: everything that they define is public."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for package in PACKAGES:
        parts.append(_heading(package))
        parts += [_columns()] if package is data else []
        for module, names in exported(package).items():
            for name in names:
                parts += described(package, name, module)
        values = [getattr(package, name) for name in package.__all__]
        further = {base: None for value in values if inspect.isclass(value) for base in bases(value)}
        for base in (base for base in further if base.__name__ not in package.__all__):
            parts += described(sys.modules[base.__module__], base.__name__, base.__module__)
    for module in MODULES:
        parts.append(_heading(module))
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
                parts += described(module, name, module.__name__)
    return "\n\n".join(parts)


def _heading(package: ModuleType) -> str:
    """Of the tutorials in docstrings the first paragraph: the pages have the rest."""
    text = inspect.getdoc(package) or ""
    return f"## Package `{package.__name__}`\n\n{markdown(text.split(chr(10) * 2)[0])}"


def _columns() -> str:
    rows = ["| field by token of every trajectory | dtype |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {dtype} |" for name, dtype in TOKEN_DTYPES.items())])
