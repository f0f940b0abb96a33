"""`hooks.md`: every hook of a plugin, from the specifications in `areal_core.plugins.hooks`."""

from __future__ import annotations

import inspect
from typing import Final

from docstrings import first_sentence, protocol_of

from areal_core import interfaces
from areal_core.plugins import KINDS, hooks
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.records import RECORD_TYPES

INTRODUCTION: Final = """# Hooks

A plugin's module has functions marked with `@hookimpl` from `areal_core.plugins`. *Registration hooks* return records
that say what the plugin supplies. *Event hooks* are called when something happens in a run. The following are errors
when the plugin is loaded: a function with a hook's name and no mark, an unknown hook, an argument that the hook does
not have, a default value of a parameter, and a hook wrapper. Take only the arguments that you need, by their names.
Event hooks are called in the order of the plugins' names, those marked `@hookimpl(tryfirst=True)` first and those with
`trylast=True` last.

An [example](../extend/plugin.md) uses both."""


def page() -> str:
    """The whole page."""
    found = {name: value for name, value in vars(hooks).items() if name.startswith(f"{PROJECT}_")}
    registration = [f"{PROJECT}_{kind}" for kind in KINDS]
    rows = ["| hook | returns | each supplies |", "|---|---|---|"]
    for kind in KINDS:
        protocol = protocol_of(kind)
        page_of = "interfaces" if hasattr(interfaces, protocol.__name__) else "api"
        link = f"[`{protocol.__name__}`]({page_of}.md#{protocol.__name__.lower()})"
        words = f"{KINDS[kind]}, {link}: {first_sentence(protocol)}"
        rows.append(f"| `{PROJECT}_{kind}()` | `{RECORD_TYPES[kind].__name__}` | {words} |")
    parts = [INTRODUCTION, "## Registration", _facts(found[registration[0]])[1], "\n".join(rows), "## Events"]
    for name, hook in found.items():
        if name not in registration:
            meaning, facts = _facts(hook)
            arguments = ", ".join(inspect.signature(hook).parameters)
            parts += [f"### `{name}({arguments})`", meaning, facts]
    return "\n\n".join(parts)


def _facts(hook: object) -> tuple[str, str]:
    """What a hook means, and a list of when, where and how often it is called."""
    *paragraphs, facts = (inspect.getdoc(hook) or "").split("\n\n")
    return "\n\n".join(paragraphs), "\n".join(f"- {line}" for line in facts.splitlines())
