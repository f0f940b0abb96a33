"""A chosen component: what stands behind every `type:` of a config.

A settings model declares a place where something is chosen by `component(kind)` (`place.py`); reading the config puts
a `Selection` there. The name is checked at once. The code behind it is imported by `load()` or `build()`, in the
process that needs it.

Settings come from one of two places. A record of a plugin may name a `Settings` model; it is imported, and the settings
are checked at once. All other components have their settings in their signature or in their class: what a config names
by import (`file.py:attr`), and components of plugins whose record names no model. Those that a plugin registers are
imported with the plugin, and checked at once. The settings of the others stay unread until they are imported. Three
kinds of processes need them:

    the process that uses the component    `settings` imports it and validates them, when they are first asked for
    the child of the preflight             validates all of them, with the whole config
    the driver                             never imports it: it adopts what the child has read (`adopt`). Engines and
                                           launchers are the exception: the driver calls their settings (`READ_EARLY`)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import core_schema, to_jsonable_python

from areal_core.config.imports import absolute_reference, check_keywords, import_reference, keyword_parameters
from areal_core.config.problems import Path as KeyPath
from areal_core.config.problems import RejectedError, dotted, from_validation, rejected
from areal_core.config.settings import NoSettings, Settings
from areal_core.errors import ConfigError, PluginError
from areal_core.plugins.catalog import CORE, Catalog
from areal_core.plugins.loading import load_attribute
from areal_core.plugins.registered import registration

if TYPE_CHECKING:
    from areal_core.config.context import ResolutionContext
    from areal_core.interfaces.model import Role
    from areal_core.plugins.records import Component

CALLED_BY_NAME: Final = ("agents", "tools", "reward_functions")
"""Kinds of functions that areal calls by keyword: with keys of a row, for example."""
READ_EARLY: Final = {"inference_engines", "train_engines", "launchers"}
"""Kinds whose settings the driver reads to place processes and to plan memory, wherever they come from."""

_leaves_unread: ContextVar[bool] = ContextVar("leaves_unread", default=False)


@contextmanager
def leaving_unread() -> Iterator[None]:
    """Refuse to import components for their settings: `NotReadError` is raised for those that are unread."""
    outer = _leaves_unread.set(True)
    try:
        yield
    finally:
        _leaves_unread.reset(outer)


class NotReadError(ConfigError):
    """The settings of a component are unread, and this process shall not import it."""


class AdoptedSettings(dict[str, Any]):
    """Settings that another process has read: plain values by name, which are attributes, too.

    Args:
        values: as a YAML file has them.
        facts: attributes of the settings model, or of the function, such as `shows_images`.
        roles: of models that the component needs.
    """

    def __init__(self, values: Mapping[str, Any], facts: Mapping[str, Any], roles: Sequence[Role]) -> None:
        super().__init__(values)
        self._attributes = {**facts, **values}
        self._roles = tuple(roles)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_attributes"][name]
        except KeyError:
            raise AttributeError(name) from None

    def needs(self, updates: int) -> Sequence[Role]:
        """See `Settings.needs`: the child asked for the updates of this config."""
        del updates
        return self._roles


@dataclass(frozen=True)
class Selection:
    """One component, chosen by name or by import, with its settings.

    Attributes:
        target: the unmistakable form of `reference`: `plugin/name`, or an import with an absolute path. It is written
            into the run folder.
        settings: an instance of the component's model, or the keyword arguments if it has none.
        common: the keys that the place itself defines, such as a reward's weight.
        reference: what the config says.
        noun: what one of its kind is called.
        unread: the context for validating the settings once the component is imported; None if they are validated.
        written: the settings as the config has them, if `unread` is set.
    """

    kind: str
    target: str
    settings: Settings | Mapping[str, Any]
    common: Settings | None = None
    reference: str = field(default="", compare=False)
    record: Component | None = field(default=None, compare=False)
    noun: str = field(default="component", compare=False)
    unread: ResolutionContext | None = field(default=None, compare=False, repr=False)
    written: Mapping[str, Any] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.unread is not None:
            object.__setattr__(self, "written", self.settings)
            object.__delattr__(self, "settings")

    def __getattr__(self, name: str) -> Any:
        """Return the settings when they are first asked for."""
        if name != "settings" or self.unread is None:
            raise AttributeError(f"a selection has no attribute '{name}'")
        if not self.is_readable:
            raise NotReadError(f"the settings of {self.title} are unread")
        try:
            return self.read()
        except RejectedError as error:
            problems = error.problems
            raise ConfigError(
                f"{self.title}: {dotted(problems[0].path)}: {problems[0].message}",
                hints=problems[0].hints,
                problems=[f"{dotted(problem.path)}: {problem.message}" for problem in problems],
            ) from error

    def __deepcopy__(self, memo: object) -> Self:
        """Return a shallow copy. Pydantic copies defaults, and the loaded plugins cannot be copied."""
        del memo
        return copy.copy(self)

    @property
    def is_read(self) -> bool:
        """Whether the settings are validated: here, or by another process."""
        return "settings" in vars(self)

    @property
    def is_readable(self) -> bool:
        """Whether `settings` can be asked for: they are read, or this process may import the component."""
        return self.is_read or not _leaves_unread.get()

    def read(self) -> Settings | Mapping[str, Any]:
        """Return the settings. Import the component and validate them first, if they are unread.

        Raises:
            RejectedError: the component cannot be imported, or settings are wrong.
        """
        if not self.is_read:
            object.__setattr__(self, "settings", self._read_here())
        return self.settings

    def adopt(self, settings: AdoptedSettings) -> None:
        """Take over unread settings that another process has read."""
        object.__setattr__(self, "settings", settings)

    def _read_here(self) -> Settings | Mapping[str, Any]:
        assert self.unread is not None
        context = replace(self.unread, imports=True)
        value = self._import(context)
        marked = registration(value)
        model = getattr(value, "Config", None) if inspect.isclass(value) else marked.config if marked else None
        if model is None:
            by_name = self.kind in CALLED_BY_NAME
            return check_keywords(value, self.written, f"'{self.target}'", context, is_called_by_name=by_name)
        model = settings_model(model, f"the Config of '{self.target}' is no Settings model")
        return validated(model, self.written, context)

    def _import(self, context: ResolutionContext) -> object:
        """Import the class or function for its settings, and note its file."""
        if self.record is not None:
            try:
                return self.load()
            except PluginError as error:
                raise rejected(error.message, *error.hints) from error
        imported = import_reference(self.target, Path())
        if imported.file:
            context.files[str(imported.file)] = imported.sha256
        return imported.value

    def declared(self, name: str, default: Any = None) -> Any:
        """Return what the component declares by an attribute, such as `needs_group`."""
        return getattr(self.declarations, name, default)

    @property
    def declarations(self) -> object:
        """What has the attributes that declare something: the settings if they have a model, or else the component."""
        return self.settings if isinstance(self.settings, Settings | AdoptedSettings) else self.load()

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
        settings = self._read_here() if isinstance(self.settings, AdoptedSettings) else self.settings
        arguments: Mapping[str, Any] = dict(settings)
        given: tuple[Any, ...] = ()
        if isinstance(target, type):
            if isinstance(settings, Settings) and not isinstance(settings, NoSettings):
                given, arguments = (settings,), {}
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
        """Return the choice as a YAML file has it. Unread settings are as they were written."""
        settings = self.settings if self.is_read else _absolute(self.written)
        return {"type": self.target, **to_jsonable_python(self.common or {}), **to_jsonable_python(settings)}

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
    """Every choice in a tree of settings, nested ones included, with the path of keys that leads to it.

    Choices below unread settings are left out within `leaving_unread`.
    """
    if isinstance(settings, Selection):
        yield path, settings
        settings = settings.settings if settings.is_readable else None
    parts: Iterable[tuple[str | int, object]] = ()
    if isinstance(settings, BaseModel | Mapping):
        parts = dict(settings).items()
    elif isinstance(settings, list | tuple):
        parts = enumerate(settings)
    for key, value in parts:
        yield from selections(value, (*path, key))


def unread_selections(config: object) -> list[tuple[KeyPath, Selection]]:
    """Return the choices whose settings are unread, with their paths."""
    with leaving_unread():
        return [(path, chosen) for path, chosen in selections(config) if not chosen.is_read]


def settings_model(model: object, problem: str) -> type[Settings]:
    """Return the model of a component's settings; `RejectedError` with the problem if it is none."""
    if not (inspect.isclass(model) and issubclass(model, Settings)):
        raise rejected(problem, "derive it from areal_core.config.Settings")
    return model


def validated(model: type[Settings], written: Mapping[str, Any], context: ResolutionContext) -> Settings:
    """Return an instance of a model; `RejectedError` has every problem."""
    try:
        return model.model_validate(dict(written), context=context)
    except ValidationError as error:
        raise RejectedError(from_validation(error)) from error


def _absolute(value: Any) -> Any:
    """Return unread settings with absolute paths of files, which mean the same in a config of another folder."""
    if isinstance(value, str):
        return absolute_reference(value)
    if isinstance(value, Mapping):
        return {key: _absolute(part) for key, part in value.items()}
    return [_absolute(part) for part in value] if isinstance(value, list) else value


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
