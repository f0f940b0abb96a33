"""Every example of docs/extend/components.md is imported, and passes the conformance suite of its kind."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_core.cli import main
from areal_core.plugins.records import KINDS
from areal_core.sdk import ForwardPass, Role
from areal_testing import conformance

PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "components.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
CONFIGS = re.findall(r"^`(\w+: [^`]*my_\w+\.py:[^`]*)`$", PAGE, re.MULTILINE)
ROWS = ({"prompt": "4+4=", "answer": "8", "completion": "8"}, {"prompt": "1+2=", "answer": "3", "completion": "3"})
AVERAGE = ForwardPass(Role("average"), "logprobs", "average_logprobs")
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("RewardSuite", "my_reward.py:exact", {"examples": (("8", 1.0), ("9", 0.0))}),
    ("DatasetSuite", "my_data.py:Sums", {"keys": ("prompt", "answer")}),
    ("WorkflowSuite", "my_workflow.py:Think", {"rows": ROWS}),
    ("EnvironmentSuite", "my_environment.py:Guess", {"rows": ROWS, "completions": ("7", "8", "?")}),
    ("RewardShapingSuite", "my_groups.py:ranked", {"examples": (((3.0, 1.0), (0.5, 0.0)),)}),
    ("GroupFilterSuite", "my_groups.py:not_solved", {"examples": (((1.0, 0.0), (1.0, 0.0)), ((1.0, 1.0), None))}),
    ("BatchTransformSuite", "my_transform.py:negative_surprise", {}),
    ("AdvantageSuite", "my_advantage.py:centered", {}),
    ("PolicyLossSuite", "my_losses.py:clipped", {}),
    ("RegularizerSuite", "my_losses.py:stay_close", {}),
    ("RegularizerSuite", "my_pull.py:pull", {"needed": (AVERAGE,)}),
    ("CorrectionSuite", "my_losses.py:near_only", {}),
    ("LossAggregationSuite", "my_aggregation.py:square_root_length", {}),
    ("AuxiliaryLossSuite", "my_critic.py:regression", {}),
    ("AlgorithmSuite", "my_algorithm.py:MyAlgorithm", {}),
    ("ExampleTokenizerSuite", "my_tokenizer.py:completion_only", {"rows": ROWS}),
    ("TrackerSuite", "my_tracker.py:Lines", {"logged": lambda self, run_dir: logged(run_dir)}),
]
NAMES = ("agent", "tools", "model", "engine", "transport", "launcher", "plugin")
BY_HAND = {"agents", "tools", "sandboxes", "models", "train_engines", "inference_engines", "weight_transports"}
BY_HAND |= {"launchers", "presets", "commands", "health_checks"}
"""Kinds whose examples the other tests import and call. Sandboxes and servers have theirs in examples/plugin."""


def logged(run_dir: Path) -> dict[tuple[int, str], float]:
    """What the tracker of the page has written."""
    lines = [json.loads(line) for line in (run_dir / "lines.jsonl").read_text().splitlines()]
    return {(line["step"], name): value for line in lines for name, value in line.items()}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """The files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def imported(folder: Path, name: str) -> Any:
    """One of the files as a module."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_has_an_example() -> None:
    kinds = {getattr(conformance, name).kind for name, _, _ in CASES}
    assert kinds | BY_HAND == set(KINDS)
    named = {component.partition(":")[0] for _, component, _ in CASES}
    assert named | {f"my_{name}.py" for name in NAMES} == set(FILES)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "component", "attributes"), CASES, ids=[component for _, component, _ in CASES])
def test_an_example_passes_its_suite(suite: str, component: str, attributes: dict[str, Any], tmp_path: Path) -> None:
    one = type("Suite", (getattr(conformance, suite),), {**attributes, "component": f"{tmp_path}/{component}"})()
    for name in (name for name in dir(one) if name.startswith("test_")):
        test = getattr(one, name)
        (tmp_path / name).mkdir()
        test(**({"tmp_path": tmp_path / name} if "tmp_path" in inspect.signature(test).parameters else {}))


@pytest.mark.parametrize("name", [pytest.param("agent", marks=pytest.mark.slow), *NAMES[1:]])  # imports openai
def test_an_example_is_imported(name: str, folder: Path) -> None:
    imported(folder, f"my_{name}")


def test_every_example_has_a_config() -> None:
    named = set(re.findall(r"my_\w+\.py", " ".join(CONFIGS)))
    assert named == set(FILES) - {"my_plugin.py"}


@pytest.mark.slow
@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_is_valid(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each over a preset."""
    monkeypatch.chdir(folder)
    ((key, value),) = yaml.safe_load(text).items()
    fine_tuning = ["workflow=null", "inference_engine=null", "rewards=[]", "evaluation=null"] if "/sft" in text else []
    words = ["config", "check", "grpo/addition", f"{key}={json.dumps(value)}", *fine_tuning]
    assert main(words) == 0, capsys.readouterr().err


def test_the_records_of_the_plugin(folder: Path) -> None:
    plugin = imported(folder, "my_plugin")
    records = [*plugin.areal_presets(), *plugin.areal_commands(), *plugin.areal_health_checks()]
    assert [record.faults() for record in records] == [[], [], []]
    assert plugin.count(["a"]) == 0
    assert plugin.check_compiler().text


def test_the_settings_of_an_advantage_in_a_plugin_say_what_it_needs() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n# the settings of a plugin\n(.*?)```", PAGE, re.DOTALL)[0], names)
    (need,) = names["TeacherSettings"]().needs(1)
    assert (need.role.needs_path, need.output, need.column) == (True, "logprobs", "teacher_logprobs")
