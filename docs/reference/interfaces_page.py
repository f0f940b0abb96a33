"""`interfaces.md`: what each kind of component must do, and the records that it meets."""

from __future__ import annotations

import importlib
import inspect
from typing import Final

from docstrings import INTERFACES, described, exported, markdown, protocol_of

from areal_core.plugins.records import KINDS

INTRODUCTION: Final = """# Interfaces

What a component of each kind must do. The target of a component is a class or a function. A class that has a settings
model gets the settings; a class named by import gets the keys beside `type:` as keyword arguments. A function is the
component itself, with its settings bound by name. [API](api.md) has the other public modules and the number of their
names; [components](../extend/components.md) has an example of each kind."""


def page() -> str:
    """The whole page."""
    rows = ["| kind | Protocol | import it from |", "|---|---|---|"]
    for kind in KINDS:
        name = protocol_of(kind).__name__
        home = next((module for module in INTERFACES if name in module.__all__), None)
        if home is not None:
            rows.append(f"| `{kind}`: {KINDS[kind].noun} | [`{name}`](#{name.lower()}) | `{home.__name__}` |")
    parts = [INTRODUCTION, "\n".join(rows)]
    for public in INTERFACES:
        parts.append(f"## Module `{public.__name__}`\n\n{markdown(inspect.getdoc(public) or '')}")
        for module, names in exported(public).items():
            importlib.import_module(module)
            for name in names:
                parts += described(public, name, module)
    return "\n\n".join(parts)
