"""`interfaces.md`: what each kind of component must do, and the records that it meets."""

from __future__ import annotations

import importlib
import inspect
from typing import Final

from docstrings import described, exported, markdown, protocol_of

from areal_core import interfaces
from areal_core.inference import adapter as servers
from areal_core.plugins import KINDS

INTRODUCTION: Final = """# Interfaces

What a component of each kind must do. The target of a component is a class or a function. A class that has a settings
model gets the settings; a class named by import gets the keys beside `type:` as keyword arguments. A function is the
component itself, with its settings bound by name. Import everything from `areal_core.interfaces`, and what adapters
for servers need from `areal_core.inference.adapter`. [API](api.md) has `areal_core.data` and the rest;
[components](../extend/components.md) has an example of each kind."""


def page() -> str:
    """The whole page."""
    rows = ["| kind | Protocol |", "|---|---|"]
    for kind in KINDS:
        name = protocol_of(kind).__name__
        if hasattr(interfaces, name):
            rows.append(f"| `{kind}`: {KINDS[kind].noun} | [`{name}`](#{name.lower()}) |")
    parts = [INTRODUCTION, "\n".join(rows)]
    for module, names in exported(interfaces).items():
        words = markdown(inspect.getdoc(importlib.import_module(module)) or "")
        parts.append(f"## Module `{module.rpartition('.')[2]}`\n\n{words}")
        for name in names:
            parts += described(interfaces, name, module)
    parts.append(f"## Module `inference.adapter`\n\n{markdown(inspect.getdoc(servers) or '')}")
    for name, value in vars(servers).items():
        if inspect.isclass(value) and value.__module__ == servers.__name__ and not name.startswith("_"):
            parts += described(servers, name, servers.__name__)
    return "\n\n".join(parts)
