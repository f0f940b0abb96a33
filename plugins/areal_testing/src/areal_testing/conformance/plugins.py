"""Conformance suite of a whole plugin: records that can be imported, and configs that need no heavy library."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

from areal_core.config import Settings, component_schema
from areal_core.plugins import Component, PluginManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.plugins import Record

READ_ALL = """
import sys
from areal_core.plugins import Component, PluginManager
manager = PluginManager.load([sys.argv[1]])
for _, record in manager.records():
    if isinstance(record, Component) and record.config is not None:
        manager.import_from(record, record.config)
print(*sorted(set(sys.argv[2:]) & set(sys.modules)))
"""


class PluginSuite:
    """Tests of a plugin. Set `plugin`.

    Attributes:
        plugin: name of the plugin's entry point.
        heavy: libraries that reading a config must not import: a machine that submits a run may not have them.
    """

    plugin: ClassVar[str]
    heavy: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def test_records_can_be_imported(self) -> None:
        """Targets and settings can be imported, and settings are classes that derive from `Settings`."""
        manager, records = self._records()
        for record in records:
            for attribute in record.LOCATIONS:
                location = getattr(record, attribute)
                if location is not None and attribute != "path":
                    manager.import_from(record, location)
            if isinstance(record, Component) and record.config is not None:
                model = manager.import_from(record, record.config)
                assert isinstance(model, type), f"{record.reference}: config leads to {model!r}, which is not a class"
                assert issubclass(model, Settings), f"{record.reference}: {model.__name__} is not derived from Settings"

    def test_every_setting_has_a_description(self) -> None:
        """Settings have descriptions, which `areal plugins NAME` and the documentation show."""
        manager, _ = self._records()
        for kind, record in manager.records():
            if isinstance(record, Component) and record.plugin == self.plugin:
                settings = component_schema(manager, kind, record)["settings"].get("properties", {})
                undocumented = [key for key, part in settings.items() if "description" not in part]
                assert not undocumented, (
                    f"{record.reference}: settings without a description: {', '.join(undocumented)}; in a "
                    "signature write Annotated[..., Field(description=...)]"
                )

    def test_a_function_takes_the_settings_that_its_record_describes(self) -> None:
        """A function's keywords are its settings. A default in the signature is the same as in the settings."""
        for name, model, target in self._components():
            if not inspect.isfunction(target):
                continue
            keywords = {p.name: p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY}
            fields = model.model_fields
            assert keywords.keys() == fields.keys(), (
                f"{name}: the function takes the keywords {sorted(keywords)}, its settings have {sorted(fields)}"
            )
            for key, parameter in keywords.items():
                assert parameter.default in (parameter.empty, fields[key].default), (
                    f"{name}: {key} is {parameter.default!r} by default in the function and {fields[key].default!r} "
                    "in the settings"
                )

    def test_the_record_of_a_class_with_a_config_names_it(self) -> None:
        """A record names the nested `Config` of its class, because areal reads configs without importing the class."""
        manager, records = self._records()
        for record in records:
            if isinstance(record, Component) and record.config is None:
                target: Any = manager.import_from(record, record.target)
                has_model = inspect.isclass(target) and hasattr(target, "Config")
                assert not has_model, f"{record.reference}: name {record.target}.Config as config in the record"

    def test_a_config_is_read_without_heavy_libraries(self) -> None:
        """A new process that loads the plugin and imports all of its settings does not import a heavy library."""
        command = [sys.executable, "-c", READ_ALL, self.plugin, *self.heavy]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stdout.split(), f"reading a config of {self.plugin} imports {done.stdout.strip()}"

    def _records(self) -> tuple[PluginManager, list[Record]]:
        manager = PluginManager.load([self.plugin])
        records = [record for _, record in manager.records() if record.plugin == self.plugin]
        assert records, f"the plugin {self.plugin} has no records"
        return manager, records

    def _components(self) -> Iterator[tuple[str, type[Settings], Any]]:
        """Yield the reference, the settings and the target of each component with settings."""
        manager, records = self._records()
        for record in records:
            if isinstance(record, Component) and record.config is not None:
                model = cast("type[Settings]", manager.import_from(record, record.config))
                yield record.reference, model, manager.import_from(record, record.target)
