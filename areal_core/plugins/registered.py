"""`register`: a function or class of a plugin's module becomes a component of the plugin."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from areal_core.plugins.markers import hookimpl
from areal_core.plugins.records import KINDS, Component, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MARK: Final = "areal_component"
_Target = TypeVar("_Target")


class Registration(NamedTuple):
    """What `register` attaches to a function or class.

    Attributes:
        hook: which returns components of this kind.
        record: of the component.
        config: its `Settings` model; None if its settings are its parameters.
    """

    hook: str
    record: Component
    config: type | None


def register(
    kind: str | Kind, name: str = "", *, summary: str = "", config: type | None = None
) -> Callable[[_Target], _Target]:
    """Register a function or class as a component of the plugin whose entry point names this module.

        @register("reward_functions")
        def brevity(completion: str, *, limit: Annotated[int, Field(ge=1, description="longest answer")] = 20) -> float:
            \"\"\"Reward short answers.\"\"\"
            return float(len(completion) <= limit)

    The plugin supplies every registered function and class that is a name in that module, those that it imports, too.
    The mark changes nothing else: a config can still choose the same function as `path/to/file.py:brevity`.

    Its settings are its parameters. `Annotated[..., Field(...)]` gives them ranges and descriptions. A class may have a
    model of its settings as `Config`; then it is called with one instance of it.

    areal imports the module whenever it loads the plugin. A module that imports torch should not be named by the entry
    point or imported there: describe its components with `Component` records instead.

    Args:
        kind: of the component: the name of a kind of the core, or the `Kind` that a plugin adds.
        name: in configs. By default the name of the function, or that of the class in snake_case.
        summary: one line that says what it is for. By default the first line of the docstring.
        config: a `Settings` model for the settings of a function. It may check them against the rest of the config.

    Raises:
        ValueError: there is no such kind, or its records are no components.
    """
    if not isinstance(kind, Kind):
        if kind not in KINDS or KINDS[kind].record is not Component:
            names = ", ".join(name for name, known in KINDS.items() if known.record is Component)
            raise ValueError(f"{kind!r} is no kind of component; kinds: {names}")
        kind = KINDS[kind]

    def mark(target: Any) -> Any:
        model = config or (getattr(target, "Config", None) if inspect.isclass(target) else None)
        record = Component(
            name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.__name__).lower(),
            summary or inspect.cleandoc(target.__doc__ or "").partition("\n")[0].removesuffix("."),
            target=f"{target.__module__}:{target.__qualname__}",
            config=f"{model.__module__}:{model.__qualname__}" if model else None,
        )
        setattr(target, _MARK, Registration(kind.hook, record, model))
        return target

    return mark


def registration(target: object) -> Registration | None:
    """Return what `register` has attached to a function or class itself, and not to a base class; None without it."""
    return getattr(target, "__dict__", {}).get(_MARK)


def registered_implementations(module: object) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    """Return hook implementations that supply the registered components of a plugin's module, with pluggy's options."""
    found: dict[str, dict[int, Component]] = {}
    for value in getattr(module, "__dict__", {}).values():
        marked = registration(value) if inspect.isclass(value) or inspect.isroutine(value) else None
        if marked is not None:
            found.setdefault(marked.hook, {})[id(marked.record)] = marked.record
    return {f"registered_{hook}": _implementation(hook, list(records.values())) for hook, records in found.items()}


def _implementation(hook: str, records: list[Component]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    function: Any = hookimpl(lambda: records, specname=hook)
    return function, function.areal_impl


def if_imported(location: str) -> Any:
    """Return what "module:attribute" names if its module is imported already; None otherwise."""
    module, _, path = location.partition(":")
    value: Any = sys.modules.get(module)
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    return value
