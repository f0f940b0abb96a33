"""Where a config is read: which plugins there are, what paths are relative to, and what has been found on the way.

A choice is validated deep inside pydantic, in models that know nothing of plugins. The scope is how it finds them; it
is held in a context variable for as long as one config is validated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from areal_core.config.imports import Imported, check_keywords, import_reference, is_import
from areal_core.config.problems import Problem, RejectedError, from_validation
from areal_core.config.selection import Choice, Selection
from areal_core.config.settings import Settings
from areal_core.errors import PluginBrokenError, PluginError
from areal_core.plugins import PluginManager
from areal_core.plugins.records import KINDS, Component, normalise, with_article

_CURRENT: ContextVar[Scope | None] = ContextVar("areal_config_scope", default=None)


@dataclass
class Scope:
    """The surroundings of one validation; `files` and `plugin_errors` are filled while it runs."""

    manager: PluginManager
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    plugin_errors: list[PluginError] = field(default_factory=list)

    @classmethod
    def current(cls) -> Scope:
        """The active scope, or, for models built by hand in a script, one with the core and the current folder."""
        return _CURRENT.get() or cls(PluginManager.load([]), Path.cwd())

    @contextmanager
    def active(self) -> Iterator[Scope]:
        """Make this the scope of everything validated inside."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def select(self, choice: Choice) -> Selection:
        """Turn a section as written into a checked `Selection`; `RejectedError` carries everything wrong with it."""
        kind = choice.place.kind
        reference, written = self._reference(choice)
        problems: list[Problem] = []
        common = self._common(choice.place.common, written, problems)
        record, imported = None, None
        try:
            if is_import(reference):
                imported = import_reference(reference, self.folder)
                settings = self._settings_of_import(imported, written)
            else:
                record = self._find(kind, reference)
                settings = self._settings_of_record(record, written)
        except RejectedError as error:
            problems.extend(error.problems)
            raise RejectedError(problems) from error
        if problems:
            raise RejectedError(problems)
        if imported and imported.file:
            self.files[str(imported.file)] = imported.sha256
        target = imported.target if imported else record.reference if record else reference
        return Selection(kind, target, settings, common, str(reference), record)

    def _reference(self, choice: Choice) -> tuple[str, dict[str, Any]]:
        """The name in a section and the keys beside it; a bare string is a section without keys."""
        spoken = KINDS[choice.place.kind]
        written = {"type": choice.written} if isinstance(choice.written, str) else choice.written
        if not isinstance(written, Mapping):
            raise RejectedError([Problem((), f"write the name of {with_article(spoken)}, or a section with `type:`")])
        rest = dict(written)
        reference = rest.pop("type", None)
        if reference is None:
            reference = choice.place.default_type
        if not isinstance(reference, str) or not reference.strip():
            available = [record.reference for record in self.manager.components(choice.place.kind)]
            hint = f"available for {choice.place.kind}: {', '.join(available) or 'nothing in the loaded plugins'}"
            raise RejectedError([Problem(("type",), f"must name {with_article(spoken)}", (hint,))])
        return reference, rest

    def _common(
        self, model: type[Settings] | None, written: dict[str, Any], problems: list[Problem]
    ) -> Settings | None:
        """Take the keys that the place defines out of `written` and validate them."""
        if model is None:
            return None
        own = {name: written.pop(name) for name in model.model_fields if name in written}
        try:
            return model.model_validate(own)
        except ValidationError as error:
            problems.extend(from_validation(error, model))
            return None

    def _find(self, kind: str, reference: str) -> Component:
        plugin = normalise(reference.rpartition("/")[0])
        if plugin in self.manager.failed:
            raise RejectedError([])  # why the plugin cannot be loaded has been said already
        before = set(self.manager.failed)
        try:
            return self.manager.find(kind, reference)
        except PluginError as error:
            if self.manager.failed != before:
                self.plugin_errors.extend(error.parts)
                raise RejectedError([]) from error
            if self.manager.failed and not plugin:
                raise RejectedError([]) from error  # it may well be supplied by a plugin that cannot be loaded
            raise RejectedError([Problem(("type",), error.message, error.hints)]) from error

    def _settings_of_record(self, record: Component, written: dict[str, Any]) -> Settings | dict[str, Any]:
        if record.config is None:
            reason = (f"'{record.reference}' takes no settings",)
            if written:
                raise RejectedError([Problem((key,), "unknown key", reason) for key in written])
            return {}
        try:
            model = self.manager.import_from(record, record.config)
            if not _is_settings(model):
                raise PluginBrokenError(
                    f"'{record.reference}' of {record.supplier} names {record.config}, which is no Settings model",
                    hints=("derive it from areal_core.config.Settings",),
                )
        except PluginError as error:
            raise RejectedError([Problem(("type",), error.message, error.hints)]) from error
        return _validated(model, written)

    def _settings_of_import(self, imported: Imported, written: dict[str, Any]) -> Settings | dict[str, Any]:
        model = getattr(imported.value, "Config", None) if inspect.isclass(imported.value) else None
        if model is None:
            return check_keywords(imported.value, written, f"'{imported.target}'")
        if not _is_settings(model):
            hint = "derive it from areal_core.config.Settings"
            raise RejectedError(
                [Problem(("type",), f"the Config of '{imported.target}' is no Settings model", (hint,))]
            )
        return _validated(model, written)


def _is_settings(model: object) -> bool:
    return inspect.isclass(model) and issubclass(model, Settings)


def _validated(model: Any, written: dict[str, Any]) -> Settings:
    try:
        return model.model_validate(written)
    except ValidationError as error:
        raise RejectedError(from_validation(error, model)) from error
