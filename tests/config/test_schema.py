"""What the schema of settings says in words: what may be written, and what counts where nothing is."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field

from areal_core.config import Settings
from areal_core.config.schema import component_schema, describe_default, describe_values
from areal_core.plugins import Component


class Inner(Settings):
    size: int = 1


class Documented(Settings):
    """Two parts.

    The second paragraph.

    Example:
        >>> Documented()
        Documented()
    """


class Everything(Settings):
    rate: float = Field(gt=0, le=1)
    names: list[str] = Field(default_factory=lambda: ["a", "b"])
    weights: dict[str, float] = Field(default={})
    where: str = Field(default_factory=lambda: "here")
    maybe: list[str] | None = Field(default_factory=list)
    several: int | Inner = Field(default_factory=lambda: 3)
    inner: Inner = Inner()
    made: Inner = Field(default_factory=Inner)
    other: Inner | None = None
    pair: tuple[float, float] = (0.9, 0.5)
    kind: Literal["all"] | list[str] = "all"
    mode: Literal["fast", "slow"] = "slow"


class Manager:
    def import_from(self, record: Component, name: str) -> object:
        return Everything


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("rate", "number above 0 up to 1", "null"),
        ("names", "list: text", '["a", "b"]'),
        ("weights", "mapping", "{}"),
        ("where", "text", '"here"'),
        ("maybe", "list: text or null", "[]"),
        ("several", "whole number or section", "3"),
        ("inner", "section", "its own"),
        ("made", "section", "its own"),
        ("other", "section or null", "null"),
        ("pair", "list", "[0.9, 0.5]"),
        ("kind", "all or list: text", '"all"'),
        ("mode", "fast or slow", '"slow"'),
    ],
)
def test_settings_are_told_in_words(name, values, default):
    record = Component("all", "has everything", target="x:y", config="x:Everything")
    settings = component_schema(Manager(), "advantages", record)["settings"]
    part = settings["properties"][name]
    assert (describe_values(part), describe_default(part)) == (values, default)
    assert (name in settings["required"]) == (name == "rate")


def test_the_example_of_a_docstring_is_not_in_the_schema():
    assert Documented.model_json_schema()["description"] == "Two parts.\n\nThe second paragraph."
