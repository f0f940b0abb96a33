"""What holds for a plugin as a whole: its records lead to code, and configs that use it need no heavy library."""

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
    """Set `plugin` to its name.

    Attributes:
        plugin: the name of its entry point.
        heavy: libraries that reading a config must not import; it is done on machines that have none of them.
    """

    plugin: ClassVar[str]
    heavy: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def test_every_record_leads_to_what_it_names(self) -> None:
        """Targets and settings can be imported, and settings are a model derived from `Settings`."""
        manager, records = self._records()
        for record in records:
            for place in record.LOCATIONS:
                location = getattr(record, place)
                if location is not None and place != "path":
                    manager.import_from(record, location)
            if isinstance(record, Component) and record.config is not None:
                model = manager.import_from(record, record.config)
                assert isinstance(model, type), f"{record.reference}: config leads to {model!r}, which is not a class"
                assert issubclass(model, Settings), f"{record.reference}: {model.__name__} is not derived from Settings"

    def test_every_setting_says_what_it_is(self) -> None:
        """`areal plugins NAME` and the documentation are made of these descriptions."""
        manager, _ = self._records()
        for kind, record in manager.records():
            if isinstance(record, Component) and record.plugin == self.plugin:
                settings = component_schema(manager, kind, record)["settings"].get("properties", {})
                silent = [key for key, part in settings.items() if "description" not in part]
                assert not silent, (
                    f"{record.reference}: settings without a description: {', '.join(silent)}; in a signature write "
                    "Annotated[..., Field(description=...)]"
                )

    def test_a_function_takes_the_settings_that_its_record_describes(self) -> None:
        """Settings arrive as keywords; a default is said in the settings, or the same in both places."""
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

    def test_a_class_with_a_model_of_its_settings_names_it_in_its_record(self) -> None:
        """areal would not find it before it imports the class. `register` names it."""
        manager, records = self._records()
        for record in records:
            if isinstance(record, Component) and record.config is None:
                target: Any = manager.import_from(record, record.target)
                has_model = inspect.isclass(target) and hasattr(target, "Config")
                assert not has_model, f"{record.reference}: name {record.target}.Config as config in the record"

    def test_a_config_is_read_without_heavy_libraries(self) -> None:
        """In a process of its own, which loads the plugin and imports all of its settings."""
        words = [sys.executable, "-c", READ_ALL, self.plugin, *self.heavy]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stdout.split(), f"reading a config of {self.plugin} imports {done.stdout.strip()}"

    def _records(self) -> tuple[PluginManager, list[Record]]:
        manager = PluginManager.load([self.plugin])
        records = [record for _, record in manager.records() if record.plugin == self.plugin]
        assert records, f"the plugin {self.plugin} supplies nothing"
        return manager, records

    def _components(self) -> Iterator[tuple[str, type[Settings], Any]]:
        """Reference, settings and target of what has settings."""
        manager, records = self._records()
        for record in records:
            if isinstance(record, Component) and record.config is not None:
                model = cast("type[Settings]", manager.import_from(record, record.config))
                yield record.reference, model, manager.import_from(record, record.target)
