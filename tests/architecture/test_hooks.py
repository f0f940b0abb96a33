"""Hook specifications: written out, fully annotated, without defaults, each with its example and its facts."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from areal_core import plugins
from areal_core.config import Settings, component
from areal_core.config.run_config import RunConfig
from areal_core.plugins import hooks
from areal_core.plugins.events import Events
from areal_core.plugins.records import KINDS

ROOT = Path(__file__).parents[2]
HOOKS = {name: value for name, value in vars(hooks).items() if name.startswith("areal_")}
ADDITIONS = {"areal_add_hooks", "areal_add_kinds"}
REGISTRATION = {kind.hook: kind for kind in KINDS.values()}
EVENTS = {name: value for name, value in HOOKS.items() if name not in {*REGISTRATION, *ADDITIONS}}
SECTIONS = ("Returns", "When", "Process", "How often", "Exception")


def test_there_is_one_registration_hook_for_every_kind():
    assert {*REGISTRATION} <= {*HOOKS}
    assert all(kind.name == name for name, kind in KINDS.items())


def test_an_ide_finds_each_hook_in_the_file():
    """No hook is made by a loop or by `globals()`."""
    written = {node.name for node in ast.parse(inspect.getsource(hooks)).body if isinstance(node, ast.FunctionDef)}
    assert written == {*HOOKS}


@pytest.mark.parametrize("name", REGISTRATION)
def test_the_annotation_of_a_registration_hook_is_the_record_of_its_kind(name):
    assert inspect.signature(HOOKS[name]).return_annotation == f"Iterable[{REGISTRATION[name].record.__name__}]"


@pytest.mark.parametrize("name", HOOKS)
def test_the_example_of_a_hook_implements_it(name):
    """It is Python, its arguments are the hook's, and its records, if it returns some, have no faults."""
    documentation = inspect.getdoc(HOOKS[name]) or ""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", documentation, re.MULTILINE)
    functions = [
        node for block in blocks for node in ast.parse(textwrap.dedent(block)).body if isinstance(node, ast.FunctionDef)
    ]
    (example,) = (function for function in functions if function.name == name)
    assert {argument.arg for argument in example.args.args} <= {*inspect.signature(HOOKS[name]).parameters}
    if name in REGISTRATION:
        names: dict[str, object] = {**vars(plugins)}
        exec(compile(ast.Module([example], []), name, "exec"), names)
        (record,) = names[name]()
        assert type(record) is REGISTRATION[name].record
        assert record.faults() == []


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
        arguments = ["hook", *list(inspect.signature(method).parameters)[1:]]
        assert arguments == list(inspect.signature(hook).parameters), name


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
        description = " ".join(field.description.split())
        row = rf"^\| `{name}` \|.*\| {re.escape(description)} \|$"
        assert re.search(row, page, re.MULTILINE), f"docs/reference/config.md does not have {model.__name__}.{name}"


def test_a_place_for_an_unknown_kind_is_a_mistake_of_the_programmer():
    with pytest.raises(ValueError, match="no kind of component is called 'reward'"):
        component("reward")
