"""A chosen component: what stands behind every `type:` of a config.

A settings model declares a place where something is chosen by `component(kind)`; reading the config puts a
`Selection` there. The choice is checked at once, name and settings; the code behind it is imported by `load()` or
`build()`, in the process that needs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import core_schema, to_jsonable_python

from areal_core.config.imports import import_reference
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import Problem, RejectedError
from areal_core.config.settings import Settings
from areal_core.errors import ConfigError
from areal_core.plugins.catalog import Catalog
from areal_core.plugins.loading import load_attribute
from areal_core.plugins.records import KINDS, Component, with_article

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Selection:
    """One component, chosen by name or by import, with its validated settings.

    `reference` is what the config says and `target` the unmistakable form of it (`plugin/name`, or an import with an
    absolute path), which is written into the run folder. `settings` is an instance of the component's model, or the
    keyword arguments when it has none. `common` holds the keys that the place itself defines, such as a reward's
    weight.
    """

    kind: str
    target: str
    settings: Settings | Mapping[str, Any]
    common: Settings | None = None
    reference: str = field(default="", compare=False)
    record: Component | None = field(default=None, compare=False)

    def load(self) -> object:
        """Import the class or function behind this choice; the only place where that happens for a plugin's."""
        if self.record is None:
            try:
                return import_reference(self.target, Path()).value
            except RejectedError as error:
                first = error.problems[0]
                raise ConfigError(first.message, hints=first.hints) from error
        installed = Catalog.scan().get(self.record.plugin) if self.record.plugin != "core" else None
        title = f"the {KINDS[self.kind]} '{self.record.reference}' of {self.record.supplier}"
        return load_attribute(self.record.target, title, installed)

    def build(self, **context: Any) -> Any:
        """Make the component. `context` is what the caller offers; a class takes from it the arguments it names.

        A class with a settings model is called with the settings first, one without gets them as keyword arguments.
        A function is the component itself, with its settings bound.
        """
        target: Any = self.load()
        if not isinstance(target, type):
            arguments = self.keywords()
            if not arguments:
                return target
            if not callable(target):
                raise ConfigError(f"'{self.target}' is not callable, so it takes no settings")
            return functools.partial(target, **arguments)
        if isinstance(self.settings, Settings):
            return target(self.settings, **_accepted(self.target, target, context, given=1))
        return target(**self.settings, **_accepted(self.target, target, context, names=self.settings))

    def keywords(self) -> dict[str, Any]:
        """The settings by name."""
        if isinstance(self.settings, Settings):
            return {name: getattr(self.settings, name) for name in type(self.settings).model_fields}
        return dict(self.settings)

    def to_tree(self) -> dict[str, Any]:
        """The choice as it stands in a YAML file."""
        tree: dict[str, Any] = {"type": self.target}
        for part in (self.common, self.settings):
            if isinstance(part, BaseModel):
                tree.update(part.model_dump(mode="json"))
            elif part:
                tree.update(to_jsonable_python(dict(part)))
        return tree

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda chosen: chosen.to_tree()),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        choice = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
        return {"anyOf": [{"type": "string"}, choice]}

    @classmethod
    def _validate(cls, value: object) -> Selection:
        if isinstance(value, Selection):
            return value
        if not isinstance(value, Choice):
            raise RejectedError([Problem((), "is no place for a component: declare the field with component(kind)")])
        from areal_core.config.scope import Scope

        return Scope.current().select(value)


@dataclass(frozen=True)
class Choice:
    """A section as it was written, together with what its place demands."""

    place: Place
    written: object


@dataclass(frozen=True)
class Place:
    """What `component()` declares: which kind is chosen here, what applies if nothing is, and the keys beside it."""

    kind: str
    default: object
    common: type[Settings] | None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "x-areal-kind": self.kind}

    @property
    def default_type(self) -> str | None:
        """The name that applies to a section which sets keys and chooses nothing."""
        chosen = self.default.get("type") if isinstance(self.default, Mapping) else self.default
        return chosen if isinstance(chosen, str) else None

    def _validate(self, value: object, handler: core_schema.ValidatorFunctionWrapHandler) -> object:
        if value is None:
            try:
                return handler(None)
            except ValidationError:
                if self.default is None:
                    raise RejectedError([self._nothing_chosen()]) from None
                value = self.default
        if isinstance(value, list | tuple):
            return handler([self._choice(item) for item in value])
        return handler(self._choice(value))

    def _choice(self, value: object) -> object:
        return value if isinstance(value, Selection) else Choice(self, value)

    def _nothing_chosen(self) -> Problem:
        from areal_core.config.scope import Scope

        available = [record.reference for record in Scope.current().manager.components(self.kind)]
        return Problem(
            (),
            f"is required: choose {with_article(KINDS[self.kind])} with `type:`",
            (f"available for {self.kind}: {', '.join(available) or 'nothing in the loaded plugins'}",),
        )


def component(kind: str, default: Any = None, common: type[Settings] | None = None, description: str = "") -> Any:
    """Declare a field of a `Settings` model as a place where a component of `kind` is chosen.

    The field is annotated `Selection`, `Selection | None` or `list[Selection]` (give the last a list as `default`).
    `default` is a reference, or a mapping with `type`. `common` is a model of keys that stand beside `type:` in this
    place whichever component is chosen.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of component is called {kind!r}; kinds: {', '.join(KINDS)}")
    declared: FieldInfo = Field(default=default, validate_default=True, description=description or KINDS[kind])
    declared.metadata.append(Place(kind, default, common))
    return declared


def selections(settings: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Selection]]:
    """Every choice in a tree of settings, nested ones included, with the path of keys that leads to it."""
    if isinstance(settings, Selection):
        yield path, settings
        yield from selections(settings.settings, path)
    elif isinstance(settings, BaseModel):
        for name in type(settings).model_fields:
            yield from selections(getattr(settings, name), (*path, name))
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from selections(value, (*path, key))
    elif isinstance(settings, Sequence) and not isinstance(settings, str | bytes):
        for index, value in enumerate(settings):
            yield from selections(value, (*path, index))


def _accepted(
    title: str, target: type, context: Mapping[str, Any], given: int = 0, names: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The part of `context` that a class asks for; an error if it asks for more than settings and context hold."""
    try:
        parameters = list(inspect.signature(target).parameters.values())[given:]
    except ValueError:
        return dict(context)
    by_name = {
        found.name: found for found in parameters if found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)
    }
    takes_all = any(found.kind is found.VAR_KEYWORD for found in parameters)
    given_names = names or {}
    lacking = [
        name
        for name, found in by_name.items()
        if found.default is found.empty and name not in context and name not in given_names
    ]
    if lacking:
        raise ConfigError(
            f"'{title}' needs {', '.join(lacking)}, which neither the config nor areal supplies",
            hints=(
                "set it beside `type:`, or give the parameter a default",
                f"areal supplies here: {', '.join(sorted(context)) or 'nothing'}",
            ),
        )
    return {
        name: value for name, value in context.items() if (takes_all or name in by_name) and name not in given_names
    }
