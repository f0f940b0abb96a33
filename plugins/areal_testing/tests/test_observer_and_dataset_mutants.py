"""The suites of data sets, trackers and event hooks pass correct ones and catch each of these broken ones."""

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


class Sets(Rows):
    def __getitem__(self, index):
        return {**self._rows[index], "tags": {"x"}}


class Nameless(Rows):
    def __getitem__(self, index):
        return {"question": self._rows[index]["prompt"]}


class Empty(Rows):
    def __init__(self):
        self._rows = []


def suite(base, part):
    return type("Suite", (base,), {"make": lambda self: part()})()


def dataset_tests(part):
    return [getattr(suite(DatasetSuite, part), name) for name in dir(DatasetSuite) if name.startswith("test_")]


def test_a_correct_data_set_passes():
    for test in dataset_tests(Rows):
        test()


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Endless, "DID NOT RAISE"),
        (Shared, "hands out the row itself"),
        (Drawn, "gives other rows"),
        (Sets, "row 0 is no JSON"),
        (Nameless, "row 0 has no prompt; it has question"),
        (Empty, "the data set is empty"),
    ],
)
def test_a_broken_data_set_is_caught(part, words):
    told = []
    for test in dataset_tests(part):
        try:
            test()
        except (AssertionError, IndexError, pytest.fail.Exception) as error:
            told.append(str(error))
    assert [words in line for line in told] != []
    assert any(words in line for line in told), told


class Lines:
    """A tracker of lines of JSON."""

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


class Meddles(Lines):
    def log(self, step, metrics):
        super().log(step, metrics)
        metrics.clear()


class Hides(Lines):
    def start(self, run_dir, config):
        super().start(run_dir, config)
        config.pop("seed")


class Late(Lines):
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
    ("part", "test", "words"),
    [
        (Forgets, "test_a_resumed_run_goes_on", "steps [2, 3] are left of 1 to 3"),
        (Meddles, "test_everything_that_is_finite_arrives", "the tracker changed the metrics"),
        (Hides, "test_everything_that_is_finite_arrives", "the tracker changed the config"),
        (Late, "test_everything_that_is_finite_arrives", "reward/mean"),
    ],
)
def test_a_broken_tracker_is_caught(part, test, words, tmp_path):
    with pytest.raises(AssertionError) as caught:
        getattr(suite(LinesSuite, part), test)(tmp_path)
    assert words in str(caught.value)


@pytest.fixture
def hearer(tmp_path, monkeypatch):
    """Installs a plugin `hearer` whose module has these hooks, as far as Python can tell."""

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


def test_correct_hooks_pass(hearer, tmp_path):
    hooks = "@hookimpl\ndef areal_step_finished(run_dir, step): (run_dir / 'step.txt').write_text(str(step))\n"
    events = hearer("writing", hooks)
    for number, name in enumerate(name for name in dir(EventsSuite) if name.startswith("test_")):
        (tmp_path / str(number)).mkdir()
        getattr(events, name)(tmp_path / str(number))


@pytest.mark.parametrize(
    ("hooks", "test"),
    [
        (
            "def areal_step_finished(metrics): int(metrics['train/loss'])",
            "test_it_hears_a_whole_run_without_an_exception",
        ),
        ("def areal_run_finished(outcome): {'done': 1}[outcome]", "test_it_hears_a_whole_run_without_an_exception"),
        ("def areal_run_finished(run_dir): (run_dir / 'mine').mkdir()", "test_it_hears_a_run_that_was_resumed"),
        (
            "def areal_run_finished(run_dir): (run_dir / 'metrics.jsonl').read_text()",
            "test_it_hears_a_run_that_ended_before_its_first_step",
        ),
    ],
)
def test_broken_hooks_are_caught(hooks, test, hearer, tmp_path):
    events = hearer("breaking", f"@hookimpl\n{hooks}\n")
    with pytest.raises(AssertionError):
        getattr(events, test)(tmp_path)
