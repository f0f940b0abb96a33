"""Docstrings and signatures as Markdown, for the pages of the reference."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core import engines, launchers, sdk, servers
from areal_core.plugins.records import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

INTERFACES: Final = (sdk, engines, servers, launchers)
"""The public modules with the Protocols of components."""
_SECTIONS: Final = {"Args:", "Attributes:", "Returns:", "Raises:", "Yields:"}
_EXAMPLE: Final = "Example:"
"""The section whose lines are code."""
_QUOTED: Final = re.compile(r"""(: |-> )(['"])(.*?)\2(?=[,)]| = |$)""")
"""An annotation in a signature, which `from __future__ import annotations` makes a text."""
_SPECIAL: Final = {"__call__", "__len__", "__getitem__"}
_PROTOCOLS: Final = {"workflows": "RolloutWorkflow", "reward_functions": "Reward", "models": "ModelSource"}
"""Of the kinds whose Protocol has another name than the kind."""


def protocol_of(kind: str) -> type:
    """What a component of a kind must satisfy: a Protocol, or the record of what is no component."""
    if kind in ("presets", "commands", "health_checks"):
        return KINDS[kind].record
    name = kind.replace("losses", "losss").removesuffix("s").replace("_", " ").title().replace(" ", "")
    for candidate in (_PROTOCOLS.get(kind, ""), name, f"{name}s", KINDS[kind].noun.title().replace(" ", "")):
        for module in INTERFACES:
            if candidate in module.__all__:
                return getattr(module, candidate)
    raise LookupError(f"no public Protocol is that of '{kind}'")


def first_sentence(documented: Any) -> str:
    """Of a docstring, without the full stop."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].removesuffix(".")


def text_of(documented: Any) -> str:
    """A docstring as Markdown: its sections and their items become lists."""
    return markdown(documented if isinstance(documented, str) else inspect.getdoc(documented) or "")


def markdown(text: str) -> str:
    """A docstring's text as Markdown."""
    written, section, code = [], "", False
    for line in inspect.cleandoc(text).splitlines():
        if line in (_EXAMPLE, *_SECTIONS):
            written += ["```", ""] if code else []
            section, code = line.removesuffix(":") if line in _SECTIONS else "", False
            written += [f"*{line.removesuffix(':')}*", ""]
        elif section and line.startswith("    "):
            mark = "" if section in ("Returns", "Yields") else "- " if line[4] != " " else "  "
            written.append(f"{mark}{line.strip()}")
        elif line.startswith("    ") or (code and not line):
            written += [] if code else ["```pycon" if line.startswith("    >>> ") else "```text"]
            code = True
            written.append(line.removeprefix("    "))
        else:
            written += ["```", ""] if code else []
            code = False
            written.append(line)
    if code:
        written.append("```")
    return "\n".join(written)


def exported(package: ModuleType) -> dict[str, list[str]]:
    """The names in `__all__` of a package by the module that they come from, both in the order of its imports."""
    found: dict[str, list[str]] = {}
    file = Path(str(package.__file__))
    stub = file.with_suffix(".pyi")
    for node in ast.walk(ast.parse((stub if stub.is_file() else file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [alias.name for alias in node.names if alias.name in package.__all__]
            if names:
                found.setdefault(node.module, []).extend(names)
    return found


def described(package: ModuleType, name: str, module: str) -> Iterator[str]:
    """A public name: its heading, its docstring, and its public methods with theirs."""
    value = getattr(package, name)
    if inspect.isclass(value):
        names = [base.__name__ for base in bases(value)]
        based = f"Derived from `{'`, `'.join(names)}`." if names else ""
        yield f"### `{name}`\n\n" + "\n\n".join(filter(None, (_class_text(value), based)))
        yield from _methods(value)
    elif inspect.isfunction(value):
        yield f"### `{name}`\n\n**`{name}{_signature(value)}`**\n\n{text_of(value)}"
    else:
        source, words = _assignment(module, name)
        yield f"### `{name}`\n\n```python\n{source}\n```\n\n{markdown(words)}"


def bases(value: type) -> list[type]:
    """The public classes of areal from which a class is derived, nearest first."""
    own = [base for base in value.__mro__[1:] if base.__module__.startswith(("areal_core", "areal_testing"))]
    return [base for base in own if not base.__name__.startswith("_")]


def _class_text(value: type) -> str:
    """A class's own docstring, or its signature where dataclass has made one up; the values of an enumeration."""
    text = value.__doc__ or ""
    if dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):
        text = ""
    members = getattr(value, "__members__", {})
    listed = "Values: " + ", ".join(f"`{name}`" for name in members) + "." if members else ""
    return "\n\n".join(filter(None, (markdown(text), listed)))


def _methods(value: type) -> Iterator[str]:
    hidden = [base for base in value.__mro__[1:] if base.__name__.startswith("_")]
    members = {name: member for one in (*reversed(hidden), value) for name, member in vars(one).items()}
    for name, member in members.items():
        function = getattr(member, "__func__", member.fget if isinstance(member, property) else member)
        is_public = not name.startswith("_") or name in _SPECIAL
        if not is_public or not inspect.isfunction(function) or name.startswith("test_"):
            continue
        words = f"async {name}" if inspect.iscoroutinefunction(function) else name
        signature = "" if isinstance(member, property) else _signature(function)
        yield "\n\n".join(filter(None, (f"**`{words}{signature}`**", text_of(function) if function.__doc__ else "")))
    tests = [name.removeprefix("test_").replace("_", " ") for name in members if name.startswith("test_")]
    if tests:
        yield "Tests: " + "; ".join(tests) + "."


def _signature(function: Any) -> str:
    """Return the signature as text, with annotations as the code has them.

    A default that is a function is shown by its name: its address changes.
    """
    text = _QUOTED.sub(r"\1\3", str(inspect.signature(function)))
    return re.sub(r"<function (?:\w+\.)*(<lambda>|\w+) at 0x[0-9a-f]+>", r"\1", text)


def _assignment(module: str, name: str) -> tuple[str, str]:
    """The statement that gives a constant its value, where it is short, and the text below it."""
    text = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
    body = ast.parse(text).body
    for node, behind in zip(body, [*body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            source = ast.get_source_segment(text, node) or ""
            source = source if "\n" not in source else source.partition(" = ")[0] + " = ..."
            return source, str(behind.value.value) if is_text else ""
    raise LookupError(f"{module} does not define {name}")
