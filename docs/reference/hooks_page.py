"""`hooks.md`: every hook of a plugin, from the specifications in `areal_core.plugins.hooks`."""

from __future__ import annotations

import inspect
from typing import Final

from docstrings import first_sentence, protocol_of

from areal_core import interfaces
from areal_core.plugins import hooks
from areal_core.plugins.markers import PROJECT
from areal_core.plugins.records import KINDS

INTRODUCTION: Final = """# Hooks

The module of a plugin has functions that are marked with `@hookimpl` from `areal_core.plugins`. *Registration hooks*
return records that say what the plugin supplies. *Additions* give other plugins further kinds and hooks. *Event hooks*
observe a run, add metrics to its steps, and may stop it. [A plugin](../extend/plugin.md) shows a registration hook,
[Hooks and kinds](../extend/hooks.md) shows the others.

Take only the arguments that you need, by their names and without a default. These are errors when a plugin is loaded: a
function with a hook's name and no mark, a hook that nobody specifies, an argument that the hook does not have, and an
argument with a default."""
ADDITIONS: Final = ("areal_add_kinds", "areal_add_hooks")


def page() -> str:
    """Return the whole page."""
    specified = {name: value for name, value in vars(hooks).items() if name.startswith(f"{PROJECT}_")}
    rows = ["| hook | returns | each supplies |", "|---|---|---|"]
    for kind in KINDS.values():
        protocol = protocol_of(kind.name)
        page_of = "interfaces" if hasattr(interfaces, protocol.__name__) else "api"
        link = f"[`{protocol.__name__}`]({page_of}.md#{protocol.__name__.lower()})"
        rows.append(f"| `{kind.hook}()` | `{kind.record.__name__}` | {kind.noun}, {link}: {first_sentence(protocol)} |")
    registration = [kind.hook for kind in KINDS.values()]
    events = [name for name in specified if name not in (*registration, *ADDITIONS)]
    common = set.intersection(*({*_facts(specified[name])} for name in registration))
    shared = [fact for fact in _facts(specified[registration[0]]) if fact in common]
    parts = [INTRODUCTION, "## Registration", "For all registration hooks:", "\n".join(shared), "\n".join(rows)]
    for heading, names in (("", registration), ("## Additions", ADDITIONS), ("## Events", events)):
        parts += filter(None, [heading])
        for name in names:
            hook = specified[name]
            facts = [fact for fact in _facts(hook) if name not in registration or fact not in common]
            parameters = ", ".join(inspect.signature(hook).parameters)
            parts += [f"### `{name}({parameters})`", _text(hook), "\n".join(facts)]
    return "\n\n".join(parts)


def _facts(hook: object) -> list[str]:
    """Return the last paragraph of a hook as a list: what it returns, and when, where and how often it is called."""
    return [f"- {line}" for line in (inspect.getdoc(hook) or "").split("\n\n")[-1].splitlines()]


def _text(hook: object) -> str:
    """Return the other paragraphs, with the examples as code."""
    lines, is_code = [], False
    for line in (inspect.getdoc(hook) or "").rpartition("\n\n")[0].splitlines():
        if line.startswith("    ") and not is_code:
            lines += ["```python"]
            is_code = True
        elif is_code and line and not line.startswith("    "):
            lines[-1:] = ["```", ""]
            is_code = False
        lines.append(line.removeprefix("    "))
    if is_code:
        lines.append("```")
    return "\n".join(lines)
