"""Test the suites of data sets, trackers and event hooks: correct components pass, and each broken one fails a test."""

from __future__ import annotations

import itertools
import json
import sys

import pytest

from areal_testing.conformance import DatasetSuite, EventsSuite, TrackerSuite


class Rows:
    def __init__(self):
        self._rows = [{"prompt": f"{number}", "tags": ["x"]} for number in range(7)]

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return dict(self._rows[index])


class Endless(Rows):
    def __getitem__(self, index):
        return dict(self._rows[index % 7])


class Shared(Rows):
    def __getitem__(self, index):
        return self._rows[index]


class Drawn(Rows):
    count = itertools.count()

    def __getitem__(self, index):
        return {"prompt": str(next(self.count)), "row": self._rows[index]}


class NotJSON(Rows):
    def __getitem__(self, index):
        return {**self._rows[index], "tags": {"x"}}


class WithoutPrompt(Rows):
    def __getitem__(self, index):
        return {"question": self._rows[index]["prompt"]}


class Empty(Rows):
    def __init__(self):
        self._rows = []


def suite(base, component):
    return type("Suite", (base,), {"make": lambda self: component()})()


def dataset_tests(component):
    return [getattr(suite(DatasetSuite, component), name) for name in dir(DatasetSuite) if name.startswith("test_")]


def test_a_correct_data_set_passes():
    for test in dataset_tests(Rows):
        test()


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Endless, "DID NOT RAISE"),
        (Shared, "hands out the row itself"),
        (Drawn, "gives other rows"),
        (NotJSON, "row 0 is not JSON"),
        (WithoutPrompt, "row 0 has no prompt; it has question"),
        (Empty, "the data set is empty"),
    ],
)
def test_a_broken_data_set_is_caught(component, message):
    errors = []
    for test in dataset_tests(component):
        try:
            test()
        except (AssertionError, IndexError, pytest.fail.Exception) as error:
            errors.append(str(error))
    assert any(message in error for error in errors), errors


class Lines:
    """A tracker that writes lines of JSON."""

    def start(self, run_dir, config):
        self.path = run_dir / "lines"

    def log(self, step, metrics):
        with self.path.open("a") as file:
            file.write(json.dumps([step, dict(metrics)]) + "\n")

    def close(self):
        pass


class Forgets(Lines):
    def start(self, run_dir, config):
        super().start(run_dir, config)
        self.path.unlink(missing_ok=True)


class ChangesMetrics(Lines):
    def log(self, step, metrics):
        super().log(step, metrics)
        metrics.clear()


class ChangesConfig(Lines):
    def start(self, run_dir, config):
        super().start(run_dir, config)
        config.pop("seed")


class WrongStep(Lines):
    def log(self, step, metrics):
        super().log(step + 1, metrics)


class LinesSuite(TrackerSuite):
    def logged(self, run_dir):
        lines = [json.loads(line) for line in (run_dir / "lines").read_text().splitlines()]
        return {(step, name): value for step, metrics in lines for name, value in metrics.items()}


def test_a_correct_tracker_passes(tmp_path):
    for number, name in enumerate(name for name in dir(LinesSuite) if name.startswith("test_")):
        (tmp_path / str(number)).mkdir()
        getattr(suite(LinesSuite, Lines), name)(tmp_path / str(number))


@pytest.mark.parametrize(
    ("component", "test", "message"),
    [
        (Forgets, "test_a_resumed_run_keeps_its_metrics", "only the steps [2, 3] of 1 to 3 are left"),
        (ChangesMetrics, "test_finite_metrics_are_logged", "the tracker changed the metrics"),
        (ChangesConfig, "test_finite_metrics_are_logged", "the tracker changed the config"),
        (WrongStep, "test_finite_metrics_are_logged", "reward/mean"),
    ],
)
def test_a_broken_tracker_is_caught(component, test, message, tmp_path):
    with pytest.raises(AssertionError) as caught:
        getattr(suite(LinesSuite, component), test)(tmp_path)
    assert message in str(caught.value)


@pytest.fixture
def install_hooks(tmp_path, monkeypatch):
    """Return a function that installs a plugin with these hooks and makes its suite."""

    def install(name: str, hooks: str) -> EventsSuite:
        site, heading = tmp_path / "site", "from areal_core.plugins import hookimpl\n"
        metadata = site / f"areal_{name}-1.dist-info"
        metadata.mkdir(parents=True)
        (site / f"areal_{name}_hooks.py").write_text(heading + hooks)
        requires = "Requires-Dist: areal-core>=0.1\n"
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: areal-{name}\nVersion: 1\n{requires}")
        (metadata / "entry_points.txt").write_text(f"[areal.plugins]\n{name} = areal_{name}_hooks\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, f"areal_{name}_hooks", raising=False)
        return type("Suite", (EventsSuite,), {"plugin": name})()

    return install


def test_correct_hooks_pass(install_hooks, tmp_path):
    hooks = "@hookimpl\ndef areal_step_finished(run_dir, step): (run_dir / 'step.txt').write_text(str(step))\n"
    suite_of_hooks = install_hooks("writing", hooks)
    for number, name in enumerate(name for name in dir(EventsSuite) if name.startswith("test_")):
        (tmp_path / str(number)).mkdir()
        getattr(suite_of_hooks, name)(tmp_path / str(number))


@pytest.mark.parametrize(
    ("hooks", "test"),
    [
        (
            "def areal_step_finished(metrics): int(metrics['train/loss'])",
            "test_hooks_of_a_whole_run_raise_no_exception",
        ),
        ("def areal_run_finished(outcome): {'done': 1}[outcome]", "test_hooks_of_a_whole_run_raise_no_exception"),
        (
            "def areal_run_finished(run_dir): (run_dir / 'mine').mkdir()",
            "test_hooks_of_a_resumed_run_raise_no_exception",
        ),
        (
            "def areal_run_finished(run_dir): (run_dir / 'metrics.jsonl').read_text()",
            "test_hooks_of_a_run_without_steps_raise_no_exception",
        ),
    ],
)
def test_broken_hooks_are_caught(hooks, test, install_hooks, tmp_path):
    suite_of_hooks = install_hooks("breaking", f"@hookimpl\n{hooks}\n")
    with pytest.raises(AssertionError):
        getattr(suite_of_hooks, test)(tmp_path)
