"""`register`: a function or class of a plugin becomes a component of it."""

from __future__ import annotations

import difflib
import inspect
import re
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
        hook: name of the hook that returns components of this kind.
        record: record of the component.
        config: the `Settings` model of a function; None if its settings are its parameters.
    """

    hook: str
    record: Component
    config: type | None


def register(
    kind: str | Kind, name: str = "", *, summary: str = "", config: type | None = None
) -> Callable[[_Target], _Target]:
    """Register a function or class as a component of the plugin whose entry point names its module.

        @register("reward_functions")
        def brevity(completion: str, *, limit: Annotated[int, Field(ge=1, description="longest answer")] = 20) -> float:
            '''Reward short answers.'''
            return float(len(completion) <= limit)

    The plugin supplies every registered function and class that the module of the entry point defines, or imports from
    its own package. The mark changes nothing else: a config can still choose the same function as
    `path/to/file.py:brevity`.

    Settings are the parameters that have a default or can only be given by name; for a class, all parameters.
    `Annotated[..., Field(...)]` gives them ranges and descriptions. A class may have a `Settings` model as `Config`;
    then areal calls it with one instance of the model.

    areal imports the module whenever it loads the plugin, also where torch is not installed. Describe components whose
    modules import torch with `Component` records instead.

    Args:
        kind: name of one of the core's kinds, or the `Kind` that a plugin adds.
        name: name of the component in configs. By default the name of the function, or that of the class in snake_case.
        summary: one line that says what it is for. By default the first sentence of the docstring.
        config: a `Settings` model for the settings of a function. It may check them against the rest of the config.

    Raises:
        ValueError: there is no such kind of component, or the function or class is registered already.
        TypeError: what is registered is no function or class, or `config` is given for a class.
    """
    if callable(kind):
        raise TypeError('register takes the kind of the component: @register("reward_functions")')
    if not isinstance(kind, Kind):
        if kind not in KINDS:
            names = [name for name, known in KINDS.items() if known.record is Component]
            near = [name for name in names if name.startswith(kind)] or difflib.get_close_matches(kind, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{kind!r} is no kind of component; {hint}kinds: {', '.join(names)}")
        kind = KINDS[kind]
    if kind.record is not Component:
        raise ValueError(f"'{kind.name}' are no components: return their records from {kind.hook}")

    def mark(target: Any) -> Any:
        is_class = inspect.isclass(target)
        if not (is_class or inspect.isfunction(target)):
            raise TypeError(f"register takes a function or class, not {target!r:.80}")
        if registration(target) is not None:
            raise ValueError(f"{target.__qualname__} is registered already")
        if is_class and config is not None:
            raise TypeError(f"write the settings model into the class: Config = {config.__name__}")
        model = getattr(target, "Config", None) if is_class else config
        record = Component(
            name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.__name__).lower(),
            summary or _first_sentence(target.__doc__),
            target=f"{target.__module__}:{target.__qualname__}",
            config=f"{model.__module__}:{model.__qualname__}" if model else None,
            is_imported=True,
        )
        setattr(target, _MARK, Registration(kind.hook, record, config))
        return target

    return mark


def registration(target: object) -> Registration | None:
    """Return what `register` has attached to a function or class itself, and not to a base class; None without it."""
    return getattr(target, "__dict__", {}).get(_MARK)


def registered_implementations(module: object) -> dict[str, tuple[Callable[..., Any], Mapping[str, Any]]]:
    """Return hook implementations that supply the registered components of a plugin's module, with pluggy's options."""
    package = getattr(module, "__package__", "") or getattr(module, "__name__", "")
    found: dict[str, dict[int, Component]] = {}
    for value in getattr(module, "__dict__", {}).values():
        marked = registration(value) if inspect.isclass(value) or inspect.isfunction(value) else None
        if marked is not None and f"{value.__module__}.".startswith(f"{package}."):
            found.setdefault(marked.hook, {})[id(marked.record)] = marked.record
    return {f"registered_{hook}": _implementation(hook, list(records.values())) for hook, records in found.items()}


def _implementation(hook: str, records: list[Component]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    function: Any = hookimpl(lambda: records, specname=hook)
    return function, function.areal_impl


def _first_sentence(docstring: str | None) -> str:
    paragraph = " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z0-9)`])[.:] ", paragraph)[0].removesuffix(".")
