"""A component that a config selects with `type:`, and its settings.

A settings model declares a field for a component with `component(kind)` (`place.py`). Validation puts a `Selection`
there and checks that the name exists. `load()` or `build()` imports the code later, in the process that needs it.

Settings come from one of two sources. The record of a plugin's component may name a `Settings` model. Validation
imports this model and checks the settings with it. All other components have their settings in their signature or in
their class: components named by import (`file.py:attr`), and components of plugins whose record names no model. Those
that a plugin registers are imported with the plugin, so their settings are checked at once. The settings of all others
stay unread until the component is imported. Three kinds of processes need them:

    the process that uses the component    imports it and validates them on the first access to `settings`
    the child of the preflight             imports all components and validates the whole config
    the driver                             imports no component and adopts what the child has read (`adopt`). Only
                                           engines and launchers are imported: the driver calls methods of their
                                           settings (`READ_EARLY`)
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
from areal_core.config.problems import RejectedError, from_validation, rejected
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
_BUILT_ALONE: Final = {"datasets", "environments", "models", "sandboxes", "trackers"}
"""Kinds whose classes get nothing but their settings. A caller may offer further arguments to those of other kinds."""
READ_EARLY: Final = {"inference_engines", "train_engines", "launchers"}
"""Kinds whose settings the driver always reads: it needs them to place processes and to plan memory."""

_leaves_unread: ContextVar[bool] = ContextVar("leaves_unread", default=False)


@contextmanager
def leaving_unread() -> Iterator[None]:
    """Import no component for its settings: an access to unread settings raises `NotReadError`."""
    outer = _leaves_unread.set(True)
    try:
        yield
    finally:
        _leaves_unread.reset(outer)


class NotReadError(ConfigError):
    """The settings of a component are unread, and this process must not import the component."""


class AdoptedSettings(dict[str, Any]):
    """Settings that another process has read. Each value is an item and an attribute.

    Args:
        values: settings by name, as a YAML file has them.
        facts: further attributes of the settings model or the function, such as `shows_images`.
        roles: roles that the component needs.
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
        """Return the roles that the other process has read, with the same number of updates; see `Settings.needs`."""
        del updates
        return self._roles


@dataclass(frozen=True)
class Selection:
    """A component that a config selects by name or by import, with its settings.

    Attributes:
        kind: name of the component's kind, such as `datasets`.
        target: the full form of `reference`: `plugin/name`, or an import with an absolute path. The config in the run
            folder has this form.
        settings: an instance of the component's settings model, or keyword arguments if it has no model.
        common: settings that every component has in this field, such as the weight of a reward.
        reference: the name or import as the config has it.
        record: the plugin's record of the component; None for an import.
        noun: word for a component of this kind, for errors.
        unread: context to validate the settings with, once the component is imported; None if they are validated.
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
        """Return `settings`, and read them on the first access."""
        if name != "settings" or self.unread is None:
            raise AttributeError(f"a selection has no attribute '{name}'")
        if not self.is_readable:
            raise NotReadError(f"the settings of {self.title} are unread")
        try:
            return self.read()
        except RejectedError as error:
            raise self.unread.error(self.title, error) from error

    def __deepcopy__(self, memo: object) -> Self:
        """Return a shallow copy. Pydantic makes deep copies of defaults, but loaded plugins cannot be copied."""
        del memo
        return copy.copy(self)

    @property
    def is_read(self) -> bool:
        """Whether the settings are validated, by this process or by another one."""
        return "settings" in vars(self)

    @property
    def is_readable(self) -> bool:
        """Whether `settings` can be accessed: they are read, or this process may import the component."""
        return self.is_read or not _leaves_unread.get()

    def read(self) -> Settings | Mapping[str, Any]:
        """Return the settings. Import the component and validate them first, if they are unread.

        Raises:
            RejectedError: the component cannot be imported, or its settings are wrong.
        """
        if not self.is_read:
            object.__setattr__(self, "settings", self._read_here())
        return self.settings

    def adopt(self, settings: AdoptedSettings) -> None:
        """Set the settings to those that another process has read."""
        object.__setattr__(self, "settings", settings)

    def _read_here(self) -> Settings | Mapping[str, Any]:
        assert self.unread is not None
        context = replace(self.unread, imports=True)
        value = self._import(context)
        marked = registration(value)
        model = getattr(value, "Config", None) if inspect.isclass(value) else marked.config if marked else None
        if taken := sorted(_settings_of_its_own(value, model) & self._common_names()):
            names = ", ".join(taken)
            raise rejected(
                f"'{self.target}' has a setting named {names}, which never gets a value: areal reads this key itself",
                "rename it",
            )
        if model is None:
            is_class = inspect.isclass(value)
            return check_keywords(
                value,
                self.written,
                f"'{self.target}'",
                context,
                is_called_by_name=self.kind in CALLED_BY_NAME and not is_class,
                is_complete=self.kind in _BUILT_ALONE if is_class else self.kind not in CALLED_BY_NAME,
            )
        model = settings_model(model, f"the Config of '{self.target}' is no Settings model")
        return validated(model, self.written, context)

    def _import(self, context: ResolutionContext) -> object:
        """Import the class or function to read its settings, and add its file to `context.files`."""
        if self.record is not None:
            try:
                return self.load()
            except PluginError as error:
                raise rejected(error.message, *error.hints) from error
        imported = import_reference(self.target, Path())
        if imported.file:
            context.files[str(imported.file)] = imported.sha256
        return imported.value

    def _common_names(self) -> set[str]:
        return set(type(self.common).model_fields) if self.common is not None else set()

    def declared(self, name: str, default: Any = None) -> Any:
        """Return what the component declares by an attribute, such as `needs_group`.

        The settings have it if they have a model, or else the function or class, which is imported.
        """
        has_model = isinstance(self.settings, Settings | AdoptedSettings)
        return getattr(self.settings if has_model else self.load(), name, default)

    @property
    def title(self) -> str:
        """Kind and name of the component, for errors."""
        return f"{self.noun} '{self.target}'"

    @property
    def plugin(self) -> str:
        """Name of the plugin that supplies the component; empty for the core's components and for imports."""
        return "" if self.record is None or self.record.plugin == CORE else self.record.plugin

    def load(self) -> object:
        """Import and return the class or function.

        Raises:
            ConfigError: a component named by import cannot be imported.
            PluginError: a plugin's component cannot be imported, or the plugin is not installed.
        """
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
        """Create the component.

            launcher = config.launcher.build()
            engine = config.inference_engine.build(log_dir=run.logs, gpus=[0, 1])

        A class is called with its settings and with the values in `context` that it has parameters for. The settings
        are the first argument if the class has a settings model, or else keyword arguments. A function is the
        component itself, with its settings bound.

        Args:
            context: values that the caller offers, by the name of a parameter.

        Raises:
            ConfigError: the component cannot be imported, or its parameters do not fit settings and context.
            PluginError: a plugin's component cannot be imported.
        """
        return self.prepare(**context)()

    def prepare(self, **context: Any) -> Callable[[], Any]:
        """Import the code, check its parameters, and return a function that creates the component.

        Args:
            context: as in `build`.

        Raises:
            ConfigError: as in `build`.
            PluginError: as in `build`.
        """
        target: Any = self.load()
        _refuse_abstract(self.target, target)
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
        """Return the settings by name."""
        return dict(self.settings)

    def to_tree(self) -> dict[str, Any]:
        """Return the selection as a YAML file has it. Unread settings have the values that the config has."""
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
    """Yield every selection in a tree of settings, nested ones included, with its path of keys.

    Within `leaving_unread`, selections inside unread settings are left out.

    Args:
        settings: a settings model, a selection, or a list or mapping of them.
        path: keys that lead to `settings`.

    Example:
        >>> from areal_core.config import NoSettings, Selection, Settings, component, selections
        >>> class MethodSettings(Settings):
        ...     advantage: Selection = component("advantages")
        >>> settings = MethodSettings(advantage=Selection("advantages", "mine/plain", NoSettings()))
        >>> for path, chosen in selections(Selection("algorithms", "mine/method", settings), ("algorithm",)):
        ...     print(path, chosen.target)
        ('algorithm',) mine/method
        ('algorithm', 'advantage') mine/plain
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
    """Return the selections whose settings are unread, with their paths."""
    with leaving_unread():
        return [(path, chosen) for path, chosen in selections(config) if not chosen.is_read]


def _settings_of_its_own(value: Any, model: Any) -> set[str]:
    """Return the names of a component's settings: those of its model, or of the parameters that only a config sets."""
    if model is not None:
        return set(getattr(model, "model_fields", ()))
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return set()
    is_class = inspect.isclass(value)
    return {
        each.name
        for each in parameters
        if is_class or (each.kind is each.KEYWORD_ONLY and each.default is not each.empty)
    }


def settings_model(model: object, problem: str) -> type[Settings]:
    """Return the model if it is a settings model. Raise `RejectedError` with the problem if not."""
    if not (inspect.isclass(model) and issubclass(model, Settings)):
        raise rejected(problem, "derive it from areal_core.config.Settings")
    return model


def validated(model: type[Settings], written: Mapping[str, Any], context: ResolutionContext) -> Settings:
    """Return a validated instance of a settings model. Raise `RejectedError` with every problem."""
    try:
        return model.model_validate(dict(written), context=context)
    except ValidationError as error:
        raise RejectedError(from_validation(error)) from error


def _absolute(value: Any) -> Any:
    """Return unread settings with absolute paths of files. A config in another folder can contain these."""
    if isinstance(value, str):
        return absolute_reference(value)
    if isinstance(value, Mapping):
        return {key: _absolute(part) for key, part in value.items()}
    return [_absolute(part) for part in value] if isinstance(value, list) else value


def _refuse_abstract(title: str, target: Any) -> None:
    """Raise `ConfigError` if a class lacks methods that its base class requires: it cannot be constructed."""
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        base = next(base for base in reversed(inspect.getmro(target)) if missing[0] in vars(base))
        raise ConfigError(f"'{title}' lacks {', '.join(missing)}, which every {base.__name__} has")


def _refuse_misfit(title: str, target: Any, given: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a class or function does not accept its settings. Code in C has no signature to check."""
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
    """Return the values in `context` that a class has parameters for.

    Args:
        title: name of the class in errors.
        target: the class.
        context: values that the caller offers.
        given: number of positional arguments that are already known.
        names: keyword arguments that are already known.

    Raises:
        ConfigError: a parameter without a default has no value.
    """
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
