"""A chosen component: what stands behind every `type:` of a config.

A settings model declares a place where something is chosen by `component(kind)` (`place.py`); reading the config puts
a `Selection` there. The choice is checked at once, name and settings; the code behind it is imported by `load()` or
`build()`, in the process that needs it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema, to_jsonable_python

from areal_core.config.imports import import_reference, keyword_parameters
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import RejectedError
from areal_core.config.settings import Settings
from areal_core.errors import ConfigError
from areal_core.plugins.catalog import CORE, Catalog
from areal_core.plugins.loading import load_attribute

if TYPE_CHECKING:
    from areal_core.plugins.records import Component


@dataclass(frozen=True)
class Selection:
    """One component, chosen by name or by import, with its validated settings.

    `reference` is what the config says and `target` the unmistakable form of it (`plugin/name`, or an import with an
    absolute path), which is written into the run folder. `settings` is an instance of the component's model, or the
    keyword arguments when it has none. `common` holds the keys that the place itself defines, such as a reward's
    weight. `noun` is what one of its kind is called.
    """

    kind: str
    target: str
    settings: Settings | Mapping[str, Any]
    common: Settings | None = None
    reference: str = field(default="", compare=False)
    record: Component | None = field(default=None, compare=False)
    noun: str = field(default="component", compare=False)

    @property
    def title(self) -> str:
        """What it is and what it is called, for errors."""
        return f"{self.noun} '{self.target}'"

    @property
    def plugin(self) -> str:
        """Name of the plugin that it is from; empty for a component of the core, of a file or of a module."""
        return "" if self.record is None or self.record.plugin == CORE else self.record.plugin

    def load(self) -> object:
        """Import the class or function behind this choice; the only place where that happens for a plugin's."""
        if self.record is None:
            try:
                return import_reference(self.target, Path()).value
            except RejectedError as error:
                first = error.problems[0]
                raise ConfigError(first.message, hints=first.hints) from error
        catalog = Catalog.scan()
        installed = catalog.get(self.record.plugin)
        if installed is None:
            raise catalog.missing([self.record.plugin])
        title = f"the {self.noun} '{self.record.reference}' of {self.record.supplier}"
        return load_attribute(self.record.target, title, installed)

    def build(self, **context: Any) -> Any:
        """Make the component. `context` is what the caller offers; a class takes from it the arguments it names.

        A class with a settings model is called with the settings first, one without gets them as keyword arguments.
        A function is the component itself, with its settings bound.
        """
        return self.prepare(**context)()

    def prepare(self, **context: Any) -> Callable[[], Any]:
        """What `build` calls last, once the code is imported and takes what it will be given; raises `ConfigError`."""
        target: Any = self.load()
        arguments: Mapping[str, Any] = self.keywords()
        given: tuple[Any, ...] = ()
        if isinstance(target, type):
            if isinstance(self.settings, Settings):
                given, arguments = (self.settings,), {}
            arguments = {**arguments, **_accepted(self.target, target, context, len(given), arguments)}
        elif arguments and not callable(target):
            raise ConfigError(f"'{self.target}' is not callable, so it takes no settings")
        _refuse_misfit(self.target, target, given, arguments)
        if isinstance(target, type):
            return functools.partial(target, *given, **arguments)
        return lambda: functools.partial(target, **arguments) if arguments else target

    def keywords(self) -> dict[str, Any]:
        """The settings by name."""
        return dict(self.settings)

    def to_tree(self) -> dict[str, Any]:
        """The choice as it stands in a YAML file."""
        return {"type": self.target, **to_jsonable_python(self.common or {}), **to_jsonable_python(self.settings)}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.custom_error_schema(
            core_schema.is_instance_schema(cls),
            custom_error_type="selection",
            custom_error_message="must be one component, in a field that is declared by component(kind)",
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_tree),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        choice = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
        return {"anyOf": [{"type": "string"}, choice]}


def selections(settings: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Selection]]:
    """Every choice in a tree of settings, nested ones included, with the path of keys that leads to it."""
    if isinstance(settings, Selection):
        yield path, settings
        settings = settings.settings
    parts: Iterable[tuple[str | int, object]] = ()
    if isinstance(settings, BaseModel | Mapping):
        parts = dict(settings).items()
    elif isinstance(settings, list | tuple):
        parts = enumerate(settings)
    for key, value in parts:
        yield from selections(value, (*path, key))


def _refuse_misfit(title: str, target: Any, given: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a class or function does not take its settings; what is in C is not asked."""
    with contextlib.suppress(ValueError):
        signature = inspect.signature(target) if callable(target) else inspect.Signature()
        try:
            (signature.bind if isinstance(target, type) else signature.bind_partial)(*given, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"'{title}' takes {signature}, which does not fit its settings: {error}",
                hints=("a function takes each setting by its name, a class the settings as its first argument",),
            ) from None


def _accepted(
    title: str, target: type, context: Mapping[str, Any], given: int = 0, names: Iterable[str] = ()
) -> dict[str, Any]:
    """The part of `context` that a class asks for; an error if it asks for more than settings and context hold."""
    parameters, takes_all = keyword_parameters(target, skip=given)
    open_parameters = {name: each for name, each in parameters.items() if name not in names}
    lacking = [name for name, each in open_parameters.items() if each.default is each.empty and name not in context]
    if lacking:
        raise ConfigError(
            f"'{title}' needs {', '.join(lacking)}, which neither the config nor areal supplies",
            hints=(
                "set it beside `type:`, or give the parameter a default",
                f"areal supplies here: {', '.join(sorted(context)) or 'nothing'}",
            ),
        )
    return {key: value for key, value in context.items() if key in open_parameters or (takes_all and key not in names)}
