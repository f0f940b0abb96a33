"""Declare a field in which the reader of a config chooses a component, and validate what a config has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import core_schema

from areal_core.config.context import ResolutionContext
from areal_core.config.imports import find_reference, is_import
from areal_core.config.problems import MOST_TOLD, Problem, RejectedError, rejected, unknown_key
from areal_core.config.selection import READ_EARLY, Selection, settings_model, validated
from areal_core.config.settings import NoSettings
from areal_core.errors import ComponentNotFoundError, PluginError
from areal_core.plugins.records import KINDS, Component, Kind, with_article

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from areal_core.config.settings import Settings


@dataclass(frozen=True)
class Place:
    """A field for a component, as `component()` declares it.

    Attributes:
        kind: kind of the component.
        default: a reference, or a mapping with `type`, that applies if the config has none; a list of them for a list.
        common: settings that every component has in this field; None if there are none.
    """

    kind: Kind
    default: object = None
    common: type[Settings] | None = None

    def select(self, written: object, context: ResolutionContext) -> Selection:
        """Return the checked selection for a section as written. Raise `RejectedError` with every problem."""
        reference, keys = self._reference(written, context)
        shared = {name: keys.pop(name) for name in (self.common.model_fields if self.common else ()) if name in keys}
        problems: list[Problem] = []
        common = chosen = None
        try:
            common = validated(self.common, shared, context) if self.common else None
        except RejectedError as error:
            problems += error.problems
        try:
            read = self._imported if is_import(reference) else self._named
            chosen = read(reference, keys, common, context)
        except RejectedError as error:
            problems += (_or_beside(problem, self.common) for problem in error.problems)
        if chosen is None or problems:
            raise RejectedError(problems)
        return chosen

    def _reference(self, written: object, context: ResolutionContext) -> tuple[str, dict[str, Any]]:
        """Return the name in a section and the keys beside it. A bare string is a section without keys."""
        keys = {"type": written} if isinstance(written, str) else written
        if not isinstance(keys, Mapping):
            beside = f" and {', '.join(self.common.model_fields)} beside it" if self.common else ""
            message = f"write the name of {with_article(self.kind.noun)}, or a section with `type:`{beside}"
            raise RejectedError([Problem((), message)])
        keys = dict(keys)
        reference = keys.pop("type", None)
        if reference is None and len(self._default_types()) == 1:
            reference = self._default_types()[0]
            if isinstance(self.default, Mapping):  # keys that the config sets replace those of the default
                keys = {**{key: value for key, value in self.default.items() if key != "type"}, **keys}
        if not isinstance(reference, str) or not reference.strip():
            raise rejected(f"must name {with_article(self.kind.noun)}", self._available(context))
        return reference, keys

    def _imported(
        self, reference: str, keys: dict[str, Any], common: Settings | None, context: ResolutionContext
    ) -> Selection:
        """Return the selection for an import. Its settings stay unread unless the driver needs them now."""
        found = find_reference(reference, context.folder)
        if found.file:
            context.files[str(found.file)] = found.sha256
        unread = replace(context, home="")
        return self._of_signature(Selection(
            self.kind.name, found.target, keys, common, str(reference), noun=self.kind.noun, unread=unread
        ), context)  # fmt: skip

    def _of_signature(self, chosen: Selection, context: ResolutionContext) -> Selection:
        """Read the settings of a component that has them in its signature, or leave them unread."""
        is_imported = chosen.record is not None and chosen.record.is_imported
        if is_imported or context.imports or self.kind.name in READ_EARLY:
            return replace(chosen, settings=chosen.read(), unread=None)
        return chosen

    def _named(
        self, reference: str, keys: dict[str, Any], common: Settings | None, context: ResolutionContext
    ) -> Selection:
        record = self._find(reference, context)
        chosen = Selection(
            self.kind.name, record.reference, keys, common, str(reference), record, self.kind.noun,
            unread=replace(context, home=record.plugin),
        )  # fmt: skip
        if record.config is None:
            return self._of_signature(chosen, context)
        try:
            model = context.manager.import_from(record, record.config)
        except PluginError as error:
            raise rejected(error.message, *error.hints) from error
        wrong = f"'{record.reference}' of {record.supplier} names {record.config}, which is no Settings model"
        if model is NoSettings and keys:
            raise RejectedError([unknown_key((key,), (), f"'{record.reference}'") for key in keys])
        settings = validated(settings_model(model, wrong), keys, replace(context, home=record.plugin))
        return replace(chosen, settings=settings, unread=None)

    def _find(self, reference: str, context: ResolutionContext) -> Component:
        """Return the record that a name refers to. Raise `RejectedError` if there is none.

        The error has no problems if a plugin cannot be loaded: the errors of plugins already report the reason.
        """
        manager = context.manager
        home = getattr(reference, "plugin", "") or (context.home if reference in self._default_types() else "")
        try:
            return manager.find(self.kind, reference, home)
        except PluginError as error:
            if set(error.parts) <= set(manager.failed.values()):
                context.plugin_errors.extend(error.parts)
                raise RejectedError([]) from error
            if manager.failed and "/" not in reference and isinstance(error, ComponentNotFoundError):
                raise RejectedError([]) from error  # a plugin that cannot be loaded may supply it
            raise rejected(error.message, *error.hints) from error

    def _default_types(self) -> list[object]:
        """Return the names in the default. Bare ones among them refer to the home plugin's components first."""
        defaults = self.default if isinstance(self.default, list) else [self.default]
        return [each.get("type") if isinstance(each, Mapping) else each for each in defaults]

    def _available(self, context: ResolutionContext) -> str:
        references = [record.reference for record in context.manager.components(self.kind.name)]
        return f"available for {self.kind.name}: {', '.join(references) or 'nothing in the loaded plugins'}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        common = {"x-areal-common": self.common.model_json_schema()} if self.common else {}
        return {**handler(schema), "x-areal-kind": self.kind.name, "x-areal-noun": self.kind.noun, **common}

    def _validate(
        self, value: object, handler: core_schema.ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        """Replace sections by selections. `handler` then checks that the field accepts one, none or a list of them."""
        if value is None:
            try:
                return handler(None)
            except ValidationError:
                if self.default is None:
                    message = f"is required: choose {with_article(self.kind.noun)} with `type:`"
                    hint = self._available(ResolutionContext.of(info))
                    raise RejectedError([Problem((), message, (hint,))]) from None
                value = self.default
        items = value if isinstance(value, list | tuple) else [value]
        chosen: list[Selection] = []
        problems: list[Problem] = []
        for index, item in enumerate(items):
            if len(problems) >= MOST_TOLD:
                break
            try:
                chosen.append(item if isinstance(item, Selection) else self.select(item, ResolutionContext.of(info)))
            except RejectedError as error:
                problems += [problem.below((index,) if items is value else ()) for problem in error.problems]
        if len(chosen) < len(items):
            raise RejectedError(problems)
        try:
            return handler(chosen if items is value else chosen[0])
        except ValidationError as error:
            names = ", ".join(str(one.reference) for one in chosen) or "a component"
            one, several = f"one component, not a list: write {names}", f"a list of components: write [{names}]"
            raise RejectedError([Problem((), f"must be {one if items is value else several}")]) from error


def component(
    kind: str | Kind, default: Any = None, common: type[Settings] | None = None, description: str | None = None
) -> Any:
    """Declare a field of a `Settings` model in which the reader of a config chooses a component.

        advantage: Selection = component("advantages", default="grpo/group_normalized")

    Annotate the field with `Selection`, `Selection | None` or `list[Selection]`.

    Args:
        kind: kind of the component: the name of one of the core's kinds, or the `Kind` that a plugin adds.
        default: a reference, or a mapping with `type`; a list of them for `list[Selection]`. A bare name means a
            component of the plugin that has these settings, if it has one of that name. None makes a component
            required, unless the annotation allows None.
        common: settings model of keys that every component may have beside `type:` in this field.
        description: description of the field, for the documentation.

    Raises:
        ValueError: there is no such kind.
    """
    kind = _kind(kind)
    declared: FieldInfo = Field(default=default, validate_default=True, description=description)
    declared.metadata.append(Place(kind, default, common))
    return declared


def select(kind: str | Kind, written: str | Mapping[str, Any]) -> Selection:
    """Return the component that a script or a test chooses, found and checked as in a config.

    Relative paths begin at the current folder. `build()` of the result makes the component.

    Args:
        kind: kind of the component, as in `component`.
        written: what a config has in such a field: a reference, or a mapping of `type` and the settings.

    Raises:
        ConfigError: there is no such component, or its settings are wrong.
        PluginError: a plugin that it names cannot be loaded.
        ValueError: there is no such kind.

    Example:
        >>> from areal_core.config import select
        >>> chosen = select("launchers", {"type": "local", "threads_per_process": 2})
        >>> chosen.target, chosen.settings.threads_per_process
        ('core/local', 2)
        >>> launcher = chosen.build()
    """
    place, context = Place(_kind(kind)), ResolutionContext()
    try:
        return place.select(written, context)
    except RejectedError as error:
        raise context.error(f"{place.kind.noun} {written!r}", error) from error


def _kind(kind: str | Kind) -> Kind:
    """Return a kind, or the core's kind of this name. Raise `ValueError` if there is none."""
    if isinstance(kind, Kind):
        return kind
    if kind not in KINDS:
        raise ValueError(f"no kind of component is called {kind!r}; kinds: {', '.join(KINDS)}")
    return KINDS[kind]


def _or_beside(problem: Problem, common: type[Settings] | None) -> Problem:
    """Return a problem with a further hint, if an unknown key may be a misspelled key of `common`."""
    is_key = problem.message == "unknown key" and len(problem.path) == 1
    hints = unknown_key(problem.path, common.model_fields).hints if common and is_key else ()
    return replace(problem, hints=(*(each for each in hints if each.startswith("did you mean")), *problem.hints))
