"""Hook specifications: fully annotated, without default values, each saying when, where, how often, and what then."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from areal_core.config import Settings, component
from areal_core.config.run_config import RunConfig
from areal_core.plugins import KINDS, hooks, records
from areal_core.plugins.events import Events

ROOT = Path(__file__).parents[2]
HOOKS = {name: value for name, value in vars(hooks).items() if name.startswith("areal_")}
EVENTS = {name: value for name, value in HOOKS.items() if name.removeprefix("areal_") not in KINDS}
SECTIONS = ("When", "Process", "How often", "Exception")


def test_there_is_one_registration_hook_for_every_kind():
    assert {name.removeprefix("areal_") for name in HOOKS} - {name.removeprefix("areal_") for name in EVENTS} == set(
        KINDS
    )
    assert set(records.RECORD_TYPES) == set(KINDS)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_annotated_and_has_no_defaults(name):
    signature = inspect.signature(HOOKS[name])
    assert signature.return_annotation is not signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
        assert parameter.default is parameter.empty, f"pluggy hands plugins the default of {parameter}, not the value"


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_when_where_how_often_and_what_an_exception_does(name):
    documentation = inspect.getdoc(HOOKS[name]) or ""
    for section in SECTIONS:
        assert re.search(rf"^{section}: \S.*\.$", documentation, re.MULTILINE), f"{name} lacks '{section}:'"


def test_the_facade_has_one_method_for_every_event_with_the_same_arguments():
    for name, hook in EVENTS.items():
        method = getattr(Events, name.removeprefix("areal_"))
        assert list(inspect.signature(method).parameters)[1:] == list(inspect.signature(hook).parameters), name


def _models(model: type[Settings]) -> list[type[Settings]]:
    models = [model]
    for field in model.model_fields.values():
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if inspect.isclass(candidate) and issubclass(candidate, Settings):
                models += _models(candidate)
    return models


@pytest.mark.parametrize("model", _models(RunConfig), ids=lambda model: model.__name__)
def test_every_key_of_a_config_is_described_and_documented(model):
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name}"
        assert "\n" not in field.description, f"{model.__name__}.{name} is described in one line"
        row = rf"^\| `{name}` \|.*\| {re.escape(field.description)} \|$"
        assert re.search(row, page, re.MULTILINE), f"docs/reference/config.md does not have {model.__name__}.{name}"


def test_a_place_for_an_unknown_kind_is_a_mistake_of_the_programmer():
    with pytest.raises(ValueError, match="no kind of component is called 'reward'"):
        component("reward")
